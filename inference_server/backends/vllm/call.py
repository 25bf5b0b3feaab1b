"""A request that a vLLM engine works on, and what of its answer has been handed over."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from headway.contracts.engines import OnDelta
from headway.contracts.errors import BackendError
from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse, PolicyVersion
from inference_server.backends.engine_adapters import EngineAdapter
from inference_server.backends.engine_experts import EngineExperts
from inference_server.backends.vllm.wire import OutputChunk, Runs, prompt_scores

log = logging.getLogger(__name__)


@dataclass(eq=False)
class VLLMCall:
    """One `generate`, from arrival to answer."""

    req: LLMRequest
    on_delta: OnDelta | None
    arrival: float = field(default_factory=time.monotonic)
    engine_id: str | None = None
    """Set while the engine has it."""
    is_interrupted: bool = False
    first_token: float | None = None
    last_event: float = 0.0
    num_recomputes: int = 0
    adapter: EngineAdapter | None = None
    """What it is sampled with beside the base, once the engine has it."""
    stamped: Runs = field(default_factory=list)
    """Versions of the tokens in its deltas."""

    @property
    def engine_adapter(self) -> str | None:
        """The adapter's name on the engine."""
        return None if self.adapter is None else self.adapter.engine_name

    @property
    def is_streamed(self) -> bool:
        """vLLM does not stream the logprobs of a prompt."""
        wants_prompt = self.req.logprob_start is not None
        return (
            self.on_delta is not None and not wants_prompt and self.req.gconfig.max_new_tokens > 0
        )

    def stamp(self, part: OutputChunk, version: PolicyVersion) -> None:
        """Hand over what a stream added.

        Args:
            version: of the base.
        """
        if self.adapter is not None:
            version = self.adapter.version
        self.last_event = time.monotonic()
        if not part.tokens:
            return
        if self.first_token is None:
            self.first_token = self.last_event
        start = end = self.stamped[-1][2] if self.stamped else 0
        if self.stamped and self.stamped[-1][0] == version:
            start = self.stamped.pop()[1]
        self.stamped.append((version, start, end + len(part.tokens)))
        self._tell(part, version, 0, len(part.tokens))

    def response(self, part: OutputChunk, experts: EngineExperts) -> LLMResponse:
        """Return the response to the request, and hand over what was not streamed.

        Args:
            part: all that the engine sent.
            experts: of the model.

        Raises:
            BackendError: vLLM named no version for some of the tokens, or sent damaged experts.
        """
        req, runs = self.req, part.runs or []
        if (runs[-1][2] if runs else 0) != len(part.tokens):
            raise BackendError(f"vLLM gave {len(part.tokens)} tokens with versions for {runs}")
        if self.adapter is not None and runs:
            runs = [(self.adapter.version, 0, len(part.tokens))]
        if self.stamped and self.stamped != runs:
            log.warning(
                "deltas were stamped with other versions than sampled them",
                extra={"rid": req.rid, "stamped": self.stamped, "sampled": runs},
            )
        scores, tops = prompt_scores(req, part)
        expert_ids = part.experts
        if req.gconfig.max_new_tokens == 0:  # it was asked for one token, to score the prompt
            is_cut = part.reason == "interrupt"
            cached_tokens = part.cached_tokens
            part = OutputChunk(
                reason="interrupt" if is_cut else "length", cached_tokens=cached_tokens
            )
            runs = []
        if not self.stamped:
            for version, start, end in runs:
                self._tell(part, version, start, end)
        match = part.match
        if part.reason == "stop" and match is None:
            match = part.tokens[-1]  # the model's own end of sequence, which vLLM leaves unnamed
        now = time.monotonic()
        return LLMResponse(
            rid=req.rid,
            output_tokens=part.tokens,
            output_logprobs=part.logprobs,
            version_runs=runs,
            stop_reason=part.reason or "interrupt",
            stop_match=match,
            latency_s=now - self.arrival,
            ttft_s=(self.first_token or now) - self.arrival,
            top_logprobs=part.top if req.top_logprobs else None,
            routed_experts=experts.of_response(expert_ids, len(req.input_ids) + len(part.tokens)),
            prompt_logprobs=scores,
            prompt_top_logprobs=tops,
            cached_tokens=part.cached_tokens,
            num_recomputes=self.num_recomputes,
        )

    def _tell(self, part: OutputChunk, version: PolicyVersion, start: int, end: int) -> None:
        """Hand over some of the tokens."""
        if self.on_delta is not None:
            self.on_delta(
                LLMDelta(
                    output_tokens=part.tokens[start:end],
                    output_logprobs=part.logprobs[start:end],
                    version=version,
                    top_logprobs=part.top[start:end] if self.req.top_logprobs else None,
                )
            )
