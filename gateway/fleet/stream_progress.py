"""What a streamed request has got so far, from however many servers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gateway.fleet.resume import join, rest_of
from headway.contracts.engines import OnDelta
from headway.contracts.errors import BackendError
from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse


class StreamProgress:
    """Goes on from the tokens that were passed on when a server is lost: they cannot be taken back."""

    def __init__(self, req: LLMRequest, on_delta: OnDelta, ends: Collection[int]) -> None:
        """
        Args:
            ends: tokens that may end a sequence.
        """
        self._req = req
        self._on_delta = on_delta
        self._ends = frozenset(ends) | frozenset(req.gconfig.stop_token_ids)
        self._deltas: list[LLMDelta] = []
        self._so_far: LLMResponse | None = None
        self.is_doubtful = False
        """True once a server sent what it may not."""

    def add(self, delta: LLMDelta) -> None:
        """Pass on what a step added."""
        self._deltas.append(delta)
        self._on_delta(delta)

    def rest(self) -> LLMRequest | LLMResponse:
        """Return the request for what is missing, now that no server is at it; the response if none is.

        Raises:
            BackendError: it cannot be told what is missing.
        """
        if self._deltas:
            lost, self._deltas = interrupted(self._req.rid, self._deltas), []
            self._so_far = lost if self._so_far is None else join(self._so_far, lost)
        if self._so_far is None:
            return self._req
        if why := self._obstacle(self._so_far):
            raise BackendError(
                f"the stream of request {self._req.rid!r} broke off after "
                f"{len(self._so_far.output_tokens)} tokens, and {why}; send it again"
            )
        if len(self._so_far.output_tokens) >= self._req.gconfig.max_new_tokens:
            return self._so_far.model_copy(update={"stop_reason": "length"})
        return rest_of(self._req, self._so_far)

    def whole(self, response: LLMResponse) -> LLMResponse:
        """Return the response with what came before it."""
        return response if self._so_far is None else join(self._so_far, response)

    def _obstacle(self, so_far: LLMResponse) -> str | None:
        """Return why nobody else can go on."""
        req = self._req
        if so_far.output_tokens[-1] in self._ends and not req.gconfig.ignore_eos:
            return "the last of them may have ended it"
        if self.is_doubtful and len(so_far.output_tokens) >= req.gconfig.max_new_tokens:
            return "its server sent what it may not"
        if req.gconfig.stop:
            return "a stop string may stand across the break"
        if req.logprob_start is not None or req.sampling_mask or req.routed_experts:
            return "what else was asked of them was lost with it"
        return None


def interrupted(rid: str, deltas: Sequence[LLMDelta]) -> LLMResponse:
    """The response of a server that was interrupted after these; its times are not known."""
    tokens: list[int] = []
    logprobs: list[float] = []
    runs: list[tuple[int, int, int]] = []
    for delta in deltas:
        start = len(tokens)
        tokens += delta.output_tokens
        logprobs += delta.output_logprobs
        if runs and runs[-1][0] == delta.version:
            start = runs.pop()[1]
        runs.append((delta.version, start, len(tokens)))
    has_top = any(delta.top_logprobs is not None for delta in deltas)
    return LLMResponse(
        rid=rid,
        output_tokens=tokens,
        output_logprobs=logprobs,
        version_runs=runs,
        stop_reason="interrupt",
        latency_s=0.0,
        ttft_s=0.0,
        top_logprobs=[t for d in deltas for t in d.top_logprobs or ()] if has_top else None,
    )
