"""Going on with a sequence that was interrupted, here or on another server.

A server that shuts down, is paused or swaps weights under the policy `abort` answers with the tokens
so far. They are valid: the rest is asked for with the prompt and these tokens as its prompt, and
both parts become one response whose logprobs and version runs are those of the servers that
sampled them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable

from headway.contracts.errors import BackendError
from headway.contracts.routed_experts import join_experts
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion, TopLogprobs

Generate = Callable[[LLMRequest], Awaitable[LLMResponse]]
Decode = Callable[[list[int]], str]
Runs = list[tuple[PolicyVersion, int, int]]
SEEDS = 2**63


async def generate_whole(
    generate: Generate,
    decode: Decode,
    req: LLMRequest,
    is_over: Callable[[], bool] = lambda: False,
) -> LLMResponse:
    """Generate one sequence to its end, however often it is interrupted.

    Args:
        is_over: true once an interruption is the end.
    Raises:
        BackendError: it was interrupted, and cannot be resumed from a prefix.
    """
    response = await generate(req)
    while response.stop_reason == "interrupt" and not is_over():
        count = len(response.output_tokens)
        is_scored = req.logprob_start is None or response.prompt_logprobs is not None
        if count == req.gconfig.max_new_tokens and is_scored:
            return response.model_copy(update={"stop_reason": "length"})
        joined = join(response, await generate(rest_of(req, response)))
        response = cut_at_stop(joined, req.gconfig.stop, decode, count)
    return response


def rest_of(req: LLMRequest, so_far: LLMResponse) -> LLMRequest:
    """The request for what is missing.

    Raises:
        BackendError: a penalty counts sampled tokens, and a prefix would not be counted; or a grammar
            would begin in the middle.
    """
    gconfig, count = req.gconfig, len(so_far.output_tokens)
    if count and (gconfig.presence_penalty or gconfig.frequency_penalty):
        raise BackendError(
            f"request {req.rid!r} was interrupted after {count} tokens; presence_penalty and "
            "frequency_penalty count sampled tokens only, so it must start over"
        )
    if count and gconfig.has_grammar:
        raise BackendError(
            f"request {req.rid!r} was interrupted after {count} tokens; json_schema and regex begin with "
            "the first one, so it must start over"
        )
    is_scored = so_far.prompt_logprobs is not None
    left = {
        "max_new_tokens": gconfig.max_new_tokens - count,
        "min_new_tokens": max(0, gconfig.min_new_tokens - count),
        "seed": None if gconfig.seed is None else (gconfig.seed + count) % SEEDS,
    }
    return req.model_copy(
        update={
            "input_ids": (*req.input_ids, *so_far.output_tokens),
            "gconfig": gconfig.model_copy(update=left),
            "logprob_start": None if is_scored else req.logprob_start,
        }
    )


def join(first: LLMResponse, second: LLMResponse) -> LLMResponse:
    """Two parts of one sequence as one response; times are those spent on servers."""
    count = len(first.output_tokens)
    prompt = first if first.prompt_logprobs is not None else second
    return LLMResponse(
        rid=first.rid,
        output_tokens=first.output_tokens + second.output_tokens,
        output_logprobs=first.output_logprobs + second.output_logprobs,
        version_runs=_join_runs(first.version_runs, second.version_runs, count),
        stop_reason=second.stop_reason,
        stop_match=second.stop_match,
        latency_s=first.latency_s + second.latency_s,
        ttft_s=first.ttft_s if count else first.latency_s + second.ttft_s,
        top_logprobs=_join_top(first.top_logprobs, second.top_logprobs),
        sampling_mask=_join_masks(first, second),
        routed_experts=join_experts([first.routed_experts, second.routed_experts]),
        prompt_logprobs=prompt.prompt_logprobs,
        prompt_top_logprobs=prompt.prompt_top_logprobs,
        cached_tokens=first.cached_tokens if count else second.cached_tokens,
        num_recomputes=first.num_recomputes + second.num_recomputes + bool(count),
    )


def cut_at_stop(
    response: LLMResponse, stop: tuple[str, ...], decode: Decode, seam: int
) -> LLMResponse:
    """End a joined response at a stop string that stands across its seam, where no server saw it.

    Args:
        seam: tokens of the first part.
    """
    tokens = response.output_tokens

    def found(length: int) -> str | None:
        text = decode(tokens[:length])
        return next((string for string in stop if string in text), None)

    if not stop or found(seam) is not None:  # one that a server let pass stays
        return response
    lengths = range(len(tokens) + 1)
    length = bisect_left(lengths, True, lo=seam, key=lambda n: found(n) is not None)
    is_known = length == len(tokens) and response.stop_reason == "stop"
    if length > len(tokens) or is_known:
        return response
    experts = response.routed_experts
    return response.model_copy(
        update={
            "output_tokens": tokens[:length],
            "output_logprobs": response.output_logprobs[:length],
            "version_runs": [
                (version, start, min(end, length))
                for version, start, end in response.version_runs
                if start < length
            ],
            "top_logprobs": response.top_logprobs and response.top_logprobs[:length],
            "sampling_mask": response.sampling_mask and response.sampling_mask.first(length),
            "routed_experts": experts and experts.first(len(experts) - (len(tokens) - length)),
            "stop_reason": "stop",
            "stop_match": found(length),
        }
    )


def _join_runs(first: Runs, second: Runs, offset: int) -> Runs:
    moved = [(version, start + offset, end + offset) for version, start, end in second]
    if first and moved and first[-1][0] == moved[0][0]:
        version, start, _ = first[-1]
        return [*first[:-1], (version, start, moved[0][2]), *moved[1:]]
    return first + moved


def _join_top(
    first: list[TopLogprobs] | None, second: list[TopLogprobs] | None
) -> list[TopLogprobs] | None:
    return None if first is None and second is None else [*(first or ()), *(second or ())]


def _join_masks(first: LLMResponse, second: LLMResponse) -> SamplingMask | None:
    parts = (first, second)
    if all(part.sampling_mask is None for part in parts):
        return None
    return SamplingMask.join(
        [part.sampling_mask or SamplingMask.whole(len(part.output_tokens)) for part in parts]
    )
