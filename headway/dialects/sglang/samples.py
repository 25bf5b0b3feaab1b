"""SGLang's `/generate` in our terms and back: body -> samples, what a sample got -> its JSON.

A sample is one sequence: every prompt of a batch gives `n` of them, prompt by prompt.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import (
    LLMDelta,
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    StopReason,
    TopLogprobs,
)
from headway.dialects.error_shapes import InvalidField
from headway.dialects.served_model import MAX_KEY, ServedModel, room_after
from headway.dialects.sglang.types import GenerateBody, SGLangSampling
from headway.text.tokenizer import TextTokenizer

T = TypeVar("T")
OUR_NAMES = {
    "seed": "sampling_params.sampling_seed",
    "logprob_start": "logprob_start_len",
    "top_logprobs": "top_logprobs_num",
    "adapter": "lora_path",
}


@dataclass(frozen=True, slots=True)
class SGLangSample:
    """One sequence that a body asks for."""

    index: int
    """Its place in the answer."""
    client_rid: str
    """The id by which the client aborts it: its own, or that of the prompt."""
    request: LLMRequest
    sampling: SGLangSampling
    has_logprobs: bool
    has_logprob_text: bool


@dataclass(frozen=True, slots=True)
class SGLangSamples:
    """All that one body asks for."""

    samples: tuple[SGLangSample, ...]
    is_list: bool
    """The answer is a list, of one too."""

    @property
    def rids(self) -> dict[str, list[str]]:
        """The client's ids, each with those of its samples."""
        rids: dict[str, list[str]] = {}
        for sample in self.samples:
            rids.setdefault(sample.client_rid, []).append(sample.request.rid)
        return rids


def read_body(body: GenerateBody, model: ServedModel, session: str | None = None) -> SGLangSamples:
    """The samples that a body asks for.

    Args:
        session: see `SGLangDialect.generate`.
    Raises:
        InvalidField: a value, or a combination of them, that cannot be served.
    """
    prompts, is_batch = _prompts(body, model.tokenizer)
    count = len(prompts)
    params = body.sampling_params
    samplings = _spread(params[0] if len(params) == 1 else params, count, "sampling_params")
    rids = _rids(body.rid, count, is_batch)
    with_logprobs = _spread(body.return_logprob or False, count, "return_logprob")
    starts = _spread(-1 if (s := body.logprob_start_len) is None else s, count, "logprob_start_len")
    tops = _spread(body.top_logprobs_num or 0, count, "top_logprobs_num")
    adapters = _spread(body.lora_path, count, "lora_path")
    if body.return_text_in_logprobs and model.tokenizer is None:
        raise InvalidField(_NO_TOKENIZER, "return_text_in_logprobs")
    version = None if body.weight_version is None else body.weight_version.exact(model)
    home = {} if session is None else {"session_id": session}
    samples: list[SGLangSample] = []
    for prompt, sampling, rid, has_logprobs, start, top, adapter in zip(
        prompts, samplings, rids, with_logprobs, starts, tops, adapters, strict=True
    ):
        if (start >= 0 or top > 0) and not has_logprobs:
            raise InvalidField("logprob_start_len and top_logprobs_num need return_logprob: true")
        for copy in range(sampling.n):
            request = _request(
                rid if sampling.n == 1 else f"{rid}_{copy}",
                prompt,
                sampling,
                copy,
                start,
                top,
                adapter,
                {**home, "group_id": rid[:MAX_KEY]} if sampling.n > 1 else home,
                version,
                model,
            )
            samples.append(
                SGLangSample(
                    len(samples), rid, request, sampling, has_logprobs, body.return_text_in_logprobs
                )
            )
    return SGLangSamples(tuple(samples), is_batch or len(samples) > 1)


_NO_TOKENIZER = "the model directory has no tokenizer.json; send input_ids"


def _prompts(
    body: GenerateBody, tokenizer: TextTokenizer | None
) -> tuple[list[tuple[int, ...]], bool]:
    """Token ids of each prompt, and whether the body holds a list of prompts."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidField("give exactly one of text and input_ids", "input_ids")
    prompts: list[tuple[int, ...]]
    if body.text is not None:
        if tokenizer is None:
            raise InvalidField(_NO_TOKENIZER, "text")
        texts = (body.text,) if isinstance(body.text, str) else body.text
        prompts = [tuple(tokenizer.encode(text)) for text in texts]
        is_batch = not isinstance(body.text, str)
    else:
        given = body.input_ids or ()
        is_batch = bool(given) and isinstance(given[0], tuple)
        prompts = list(given) if is_batch else [given]  # type: ignore[arg-type, list-item]
    if not all(prompts) or not prompts:
        raise InvalidField("a prompt is empty; give at least one token", "input_ids")
    return prompts, is_batch


def _spread(given: T | tuple[T, ...], count: int, name: str) -> tuple[T, ...]:
    """One value per prompt."""
    if not isinstance(given, tuple):
        return (given,) * count
    if len(given) != count:
        raise InvalidField(f"{name} has {len(given)} values for {count} prompts", name)
    return given


def _rids(given: str | tuple[str, ...] | None, count: int, is_batch: bool) -> tuple[str, ...]:
    if given is None:
        return tuple(uuid.uuid4().hex for _ in range(count))
    if isinstance(given, str):
        return tuple(f"{given}_{i}" for i in range(count)) if is_batch else (given,)
    if len(set(given)) < len(given):
        raise InvalidField("Duplicate request ID detected within rid; give each once", "rid")
    return _spread(given, count, "rid")


def _request(
    rid: str,
    prompt: tuple[int, ...],
    sampling: SGLangSampling,
    copy: int,
    start: int,
    top: int,
    adapter: str | None,
    metadata: dict[str, str],
    version: PolicyVersion | None,
    model: ServedModel,
) -> LLMRequest:
    most = sampling.max_new_tokens
    stop = (sampling.stop,) if isinstance(sampling.stop, str) else sampling.stop
    seed = sampling.sampling_seed
    try:
        gconfig = SamplingConfig(
            max_new_tokens=room_after(model, len(prompt)) if most is None else most,
            min_new_tokens=sampling.min_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=None if sampling.top_k == -1 else sampling.top_k,
            min_p=sampling.min_p,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            stop=stop or (),
            stop_token_ids=sampling.stop_token_ids or (),
            ignore_eos=sampling.ignore_eos,
            logit_bias=sampling.logit_bias or {},
            json_schema=sampling.json_schema,
            regex=sampling.regex,
            seed=None if seed is None else (seed + copy) % 2**63,
        )
        return LLMRequest(
            rid=rid,
            input_ids=prompt,
            gconfig=gconfig,
            top_logprobs=top,
            adapter=adapter,
            logprob_start=start if start >= 0 else None,
            metadata=metadata,
            version=version,
        )
    except ValidationError as error:
        raise InvalidField.of(error, OUR_NAMES) from error


@dataclass
class SampleOutput:
    """Output of a sample so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[tuple[PolicyVersion, int, int]] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    stop_reason: StopReason | None = None
    """None while it goes on."""
    stop_match: int | str | None = None
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[TopLogprobs | None] = field(default_factory=list)
    cached_tokens: int = 0
    num_recomputes: int = 0

    def add(self, delta: LLMDelta) -> None:
        """Take in one step."""
        start = len(self.tokens)
        if self.runs and self.runs[-1][0] == delta.version:
            start = self.runs.pop()[1]
        self.tokens.extend(delta.output_tokens)
        self.logprobs.extend(delta.output_logprobs)
        self.top_logprobs.extend(delta.top_logprobs or ())
        self.runs.append((delta.version, start, len(self.tokens)))

    @classmethod
    def of(cls, response: LLMResponse) -> SampleOutput:
        """The end of it."""
        return cls(
            tokens=response.output_tokens,
            logprobs=response.output_logprobs,
            runs=response.version_runs,
            top_logprobs=response.top_logprobs or [],
            stop_reason=response.stop_reason,
            stop_match=response.stop_match,
            prompt_logprobs=response.prompt_logprobs or [],
            prompt_top_logprobs=response.prompt_top_logprobs or [],
            cached_tokens=response.cached_tokens,
            num_recomputes=response.num_recomputes,
        )


@dataclass(frozen=True, slots=True)
class Renderer:
    """Writes what one body's samples got."""

    label: Callable[[PolicyVersion], str]
    tokenizer: TextTokenizer | None
    version: PolicyVersion
    """Version that was served when the body came, for samples without a token."""
    arrival: float
    """`time.monotonic()` of it."""

    def write(self, sample: SGLangSample, output: SampleOutput) -> dict[str, Any]:
        """The JSON of one sample."""
        text = (
            {} if self.tokenizer is None else {"text": self._text(self.tokenizer, sample, output)}
        )
        return {**text, "output_ids": output.tokens, "meta_info": self._meta(sample, output)}

    def _meta(self, sample: SGLangSample, output: SampleOutput) -> dict[str, Any]:
        last = output.runs[-1][0] if output.runs else self.version
        label = str if sample.request.adapter else self.label  # adapters have numbers alone
        return {
            "id": sample.request.rid,
            "finish_reason": _finish_reason(output),
            "prompt_tokens": len(sample.request.input_ids),
            "completion_tokens": len(output.tokens),
            "cached_tokens": output.cached_tokens,
            "cached_tokens_details": None,
            "weight_version": label(last),
            "weight_version_start": label(output.runs[0][0] if output.runs else self.version),
            "weight_version_end": label(last),
            "weight_versions": [
                {"version": label(version), "start": start, "end": end}
                for version, start, end in output.runs
            ],
            "num_retractions": output.num_recomputes,
            "reasoning_tokens": 0,
            **(self._logprobs(sample, output) if sample.has_logprobs else {}),
            "dp_rank": None,
            "e2e_latency": time.monotonic() - self.arrival,
            "response_sent_to_client_ts": time.time(),
        }

    def _logprobs(self, sample: SGLangSample, output: SampleOutput) -> dict[str, Any]:
        start = sample.request.logprob_start
        prompt = () if start is None else sample.request.input_ids[start:]
        given = output.prompt_logprobs or [None] * len(prompt)
        fields: dict[str, Any] = {
            "input_token_logprobs": [
                self._triple(sample, token, logprob)
                for token, logprob in zip(prompt, given, strict=True)
            ]
            if output.prompt_logprobs
            else [],
            "output_token_logprobs": [
                self._triple(sample, token, logprob)
                for token, logprob in zip(output.tokens, output.logprobs, strict=True)
            ],
            "output_token_logprobs_length": len(output.tokens),
        }
        if sample.request.top_logprobs:
            fields["input_top_logprobs"] = [
                self._top(sample, t) for t in output.prompt_top_logprobs
            ]
            fields["output_top_logprobs"] = [self._top(sample, t) for t in output.top_logprobs]
        return fields

    def _top(self, sample: SGLangSample, top: TopLogprobs | None) -> list[Any] | None:
        return None if top is None else [self._triple(sample, token, lp) for token, lp in top]

    def _triple(self, sample: SGLangSample, token: int, logprob: float | None) -> list[Any]:
        text = None
        if sample.has_logprob_text and self.tokenizer is not None:
            text = self.tokenizer.decode([token], skip_special_tokens=False)
        return [logprob, token, text]

    def _text(self, tokenizer: TextTokenizer, sample: SGLangSample, output: SampleOutput) -> str:
        skips = sample.sampling.skip_special_tokens
        match = None if sample.sampling.no_stop_trim else output.stop_match
        if isinstance(match, int) and output.tokens and output.tokens[-1] == match:
            return tokenizer.decode(output.tokens[:-1], skip_special_tokens=skips)
        text = tokenizer.decode(output.tokens, skip_special_tokens=skips)
        if isinstance(match, str):
            return text[:found] if (found := text.find(match)) >= 0 else text
        # A character whose bytes are not all there yet comes whole with the next chunk.
        return text.rstrip("\ufffd") if output.stop_reason is None else text


def _finish_reason(output: SampleOutput) -> dict[str, Any] | None:
    if output.stop_reason is None:
        return None
    if output.stop_reason == "length":
        return {"type": "length", "length": len(output.tokens)}
    if output.stop_reason == "stop":
        match = output.tokens[-1] if output.stop_match is None else output.stop_match
        return {"type": "stop", "matched": match}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
