"""Our requests and answers in vLLM's words.

Token ids go in and out by `/inference/v1/generate` (`--enable-scale-out`), which says at the end of an
answer which weights sampled which tokens (`weight_versions`); vLLM 0.32's `/v1/completions` does not.
Pure functions: nothing here talks to an engine.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import BackendError, DataError
from headway.contracts.types import LLMRequest, PolicyVersion, StopReason, TopLogprobs

GENERATE = "/inference/v1/generate"
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
Runs = list[tuple[PolicyVersion, int, int]]

MIN_TEMPERATURE = 0.01
"""vLLM silently samples at this temperature when a lower one is asked for."""
MAX_TEMPERATURE = 2.0
NOT_FINITE = -9999.0
"""Number that vLLM writes for a logprob that is not finite."""
STOP_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "interrupt"}


@dataclass(slots=True)
class OutputChunk:
    """Additions of one event of a stream, or a whole response."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    """Top logprobs per token, the most likely first."""
    reason: StopReason | None = None
    """None while it goes on."""
    match: int | str | None = None
    runs: Runs | None = None
    """Versions that sampled the tokens; only at the end."""
    prompt: list[dict[int, float] | None] | None = None
    """For each position of the prompt, the logprob of its own token and those of the most likely ones.
    """
    cached_tokens: int = 0
    experts: NDArray[Any] | None = None
    """Routed experts of all tokens but the last, prompt included; only at the end."""

    def extend(self, part: OutputChunk) -> None:
        """Add what the next event brought."""
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        self.top += part.top
        self.cached_tokens = self.cached_tokens or part.cached_tokens
        if part.reason is not None:
            self.reason, self.match, self.runs = part.reason, part.match, part.runs
            self.experts = part.experts


def engine_id_of(request_id: str) -> str:
    """Return the id by which `/abort_requests` knows a request; its own has no effect there."""
    return f"generate-tokens-{request_id}"


def generate_body(
    request_id: str, req: LLMRequest, salt: str, adapter: str | None, is_stream: bool
) -> dict[str, Any]:
    """Return the body to post; `salt` keeps the prefixes of one version apart from another's."""
    sampling = sampling_params(req)
    sampling["detokenize"] = bool(req.gconfig.stop)  # only stop strings need the text
    body = {
        "request_id": request_id,
        "token_ids": req.input_ids,
        "sampling_params": sampling,
        "cache_salt": salt,
    }
    return body | (_STREAM if is_stream else {}) | ({} if adapter is None else {"model": adapter})


def read_chunk(answer: dict[str, Any], num_top: int) -> OutputChunk:
    """Read an answer, or one event of a stream.

    Raises:
        BackendError: the answer is not what this version of vLLM should give.
    """
    usage = answer.get("usage") or {}
    part = OutputChunk(
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    )
    if not answer["choices"]:
        return part
    choice = answer["choices"][0]
    part.tokens = choice["token_ids"] or []
    for entry in (choice["logprobs"] or {}).get("content") or []:
        part.logprobs.append(entry["logprob"])
        ranked = [(c["token_id"], c["logprob"]) for c in entry["top_logprobs"]]
        part.top.append(_most_likely(ranked, num_top))
    if choice["finish_reason"] is not None:
        part.reason = _stop_reason(choice["finish_reason"])
        part.match = choice["stop_reason"]
        part.runs = _runs(choice["weight_versions"], len(part.tokens))
        part.experts = _experts(choice.get("routed_experts"))
    prompt = answer.get("prompt_logprobs")
    if prompt is not None:
        part.prompt = [
            entry and {int(token): scored["logprob"] for token, scored in entry.items()}
            for entry in prompt
        ]
    return _checked(part)


_STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def sampling_params(req: LLMRequest) -> dict[str, Any]:
    """Every sampling field, spelled out: a default of the model's generation config never applies."""
    gconfig = req.gconfig
    return {
        "max_tokens": max(1, gconfig.max_new_tokens),  # vLLM cannot score without sampling
        "min_tokens": gconfig.min_new_tokens,
        "temperature": gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": gconfig.top_k or 0,
        "min_p": gconfig.min_p,
        "stop_token_ids": gconfig.stop_token_ids,
        "stop": gconfig.stop,
        "ignore_eos": gconfig.ignore_eos,
        "presence_penalty": gconfig.presence_penalty,
        "frequency_penalty": gconfig.frequency_penalty,
        "repetition_penalty": gconfig.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in gconfig.logit_bias.items()} or None,
        "seed": gconfig.seed,
        "logprobs": req.top_logprobs,
        "prompt_logprobs": None if req.logprob_start is None else req.top_logprobs,
        "skip_special_tokens": True,
        **_grammar(gconfig),
    }


def _grammar(gconfig: SamplingConfig) -> dict[str, Any]:
    if gconfig.json_schema is not None:
        return {"structured_outputs": {"json": gconfig.json_schema}}
    return {} if gconfig.regex is None else {"structured_outputs": {"regex": gconfig.regex}}


def check_sampling(gconfig: SamplingConfig, mode: LogprobsMode | None) -> None:
    """Refuse what vLLM would clamp, or answer with logprobs that are not ours.

    Ours are those after temperature, penalties and bias, before top_k, top_p and min_p. vLLM's are
    either raw (before all) or processed (after all), by a flag of the engine.

    Raises:
        DataError: names the field, and a remedy.
    """
    temperature = gconfig.temperature
    if 0.0 < temperature < MIN_TEMPERATURE or temperature > MAX_TEMPERATURE:
        raise DataError(
            f"temperature={temperature}, vLLM samples at 0 or within [{MIN_TEMPERATURE}, "
            f"{MAX_TEMPERATURE}]; set one of these"
        )
    cut: dict[str, Any] = {"min_new_tokens": 0}  # it bans the tokens that end a sequence
    if temperature > 0.0:
        cut |= {"top_p": 1.0, "top_k": None, "min_p": 0.0}
    shape = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    scale = {"temperature": 1.0} if temperature > 0.0 else {}
    if mode != "raw_logprobs" and (given := _differing(gconfig, cut)):
        raise DataError(
            f"{given}: this vLLM engine reports logprobs after that cut, ours are those before it; "
            "leave it out, or start the engine with --logprobs-mode raw_logprobs for sampling at "
            "temperature 1 without penalties"
        )
    if mode != "processed_logprobs" and (
        given := _differing(gconfig, {**scale, **shape, "logit_bias": {}})
    ):
        raise DataError(
            f"{given}: this vLLM engine reports logprobs before it is applied, ours are those after "
            "it; leave it out, or start the engine with --logprobs-mode processed_logprobs"
        )


def _differing(gconfig: SamplingConfig, defaults: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}={getattr(gconfig, name)}"
        for name, default in defaults.items()
        if getattr(gconfig, name) != default
    )


def prompt_scores(
    req: LLMRequest, part: OutputChunk
) -> tuple[list[float | None] | None, list[TopLogprobs | None] | None]:
    """Logprobs of the prompt from `logprob_start` on, and the most likely tokens if asked for."""
    start = req.logprob_start
    if start is None:
        return None, None
    positions = len(req.input_ids)
    prompt = part.prompt
    if prompt is None or len(prompt) != positions:
        if part.reason != "interrupt":
            raise BackendError(f"vLLM did not score the prompt of {req.rid}; its log has more")
        prompt = [None] * positions  # aborted before
    scores: list[float | None] = []
    tops: list[TopLogprobs | None] = []
    for token, entry in zip(req.input_ids[start:], prompt[start:], strict=True):
        scores.append(None if entry is None else entry[token])
        tops.append(None if entry is None else _most_likely([*entry.items()], req.top_logprobs))
    return scores, tops if req.top_logprobs else None


def _most_likely(candidates: TopLogprobs, num_top: int) -> TopLogprobs:
    """vLLM lists the sampled token first, also where it is not among the most likely."""
    likely = [each for each in dict(candidates).items() if each[1] > NOT_FINITE]
    return sorted(likely, key=lambda c: -c[1])[:num_top]


def _checked(part: OutputChunk) -> OutputChunk:
    if len(part.logprobs) != len(part.tokens):
        raise BackendError(
            f"vLLM sent {len(part.tokens)} tokens with {len(part.logprobs)} logprobs"
        )
    if any(logprob <= NOT_FINITE for logprob in part.logprobs):
        raise BackendError("the weights gave logits that are not finite; see the trainer's metrics")
    return part


def _stop_reason(finish: str) -> StopReason:
    if finish not in STOP_REASONS:
        raise BackendError(
            f"vLLM ended a request with {finish!r}, known: {', '.join(STOP_REASONS)}"
        )
    return STOP_REASONS[finish]


def _experts(packed: str | None) -> NDArray[Any] | None:
    """Return an array that vLLM packed as a `.npy` file in base64."""
    if packed is None:
        return None
    try:
        content = base64.b64decode(packed, validate=True)
        found: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    except (TypeError, ValueError) as error:
        raise BackendError(f"vLLM sent routed experts that cannot be read: {error}") from error
    return found


def _runs(spans: list[dict[str, Any]] | None, num_tokens: int) -> Runs:
    if spans is None and num_tokens:
        raise BackendError(
            "vLLM did not say which weights sampled its tokens; this backend needs vLLM >= 0.32"
        )
    try:
        return [(int(span["version"]), span["start"], span["end"]) for span in spans or []]
    except ValueError as error:
        raise BackendError(
            f"the engine's weights are labelled by another client: {spans}; labels are our version "
            "numbers, set through this server only"
        ) from error
