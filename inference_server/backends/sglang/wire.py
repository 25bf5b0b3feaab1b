"""Requests and responses of SGLang's `/generate`: pure translations, no I/O.

Where SGLang means something else by a field than our contract, the difference is settled here:
- `ignore_eos` makes it ignore `stop_token_ids` too; `find_stop` finds them in what comes back.
- the first prompt logprob that it reports is null at every `logprob_start_len`: we ask for one more.
- `top_logprobs_num` above the vocabulary kills it: the vocabulary is the bound.
- a token that was in flight at an in-place swap is stamped with the new version although the old one
  sampled it: `version_runs` moves the boundary.

What cannot be settled is refused (`check_supported`). Measured on 0.5.23: with overlap scheduling, the
presence and frequency penalties miss the newest token and count the prompt's last one instead;
`repetition_penalty` never counts the prompt; `sampling_seed` is ignored without deterministic inference.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import BackendError, DataError, ServiceError
from headway.contracts.types import LLMRequest, PolicyVersion, StopReason, TopLogprobs

Runs = list[tuple[PolicyVersion, int, int]]

LAST_LINE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """A request's output so far; SGLang's streams repeat all of it."""

    tokens: list[int]
    meta: Mapping[str, Any]

    @property
    def finish(self) -> Mapping[str, Any] | None:
        """Why it ended; None while it goes on."""
        found: Mapping[str, Any] | None = self.meta.get("finish_reason")
        return found

    @property
    def is_aborted(self) -> bool:
        return self.finish is not None and self.finish["type"] == "abort"


def generate_body(req: LLMRequest, rid: str, vocab_size: int) -> dict[str, Any]:
    """The body of a `/generate` that reports logprobs."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": req.input_ids,
        "sampling_params": sampling_params(req.gconfig),
        "return_logprob": True,
        "top_logprobs_num": min(req.top_logprobs, vocab_size),
    }
    if req.logprob_start is not None:
        body["logprob_start_len"] = _start_of_scores(req.logprob_start)
    return body


def sampling_params(gconfig: SamplingConfig) -> dict[str, Any]:
    """Every field of ours in SGLang's words."""
    params: dict[str, Any] = {
        "max_new_tokens": gconfig.max_new_tokens,
        "temperature": gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": -1 if gconfig.top_k is None else gconfig.top_k,
        "min_p": gconfig.min_p,
        "stop": list(gconfig.stop),
        "stop_token_ids": list(gconfig.stop_token_ids),
        "ignore_eos": gconfig.ignore_eos,
        "presence_penalty": gconfig.presence_penalty,
        "frequency_penalty": gconfig.frequency_penalty,
    }
    if not gconfig.ignore_eos:  # nothing to hold back otherwise, and SGLang would hold back the EOS
        params["min_new_tokens"] = gconfig.min_new_tokens
    if gconfig.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in gconfig.logit_bias.items()}
    if gconfig.seed is not None:
        params["sampling_seed"] = gconfig.seed
    if gconfig.json_schema is not None:
        params["json_schema"] = json.dumps(gconfig.json_schema)
    if gconfig.regex is not None:
        params["regex"] = gconfig.regex
    return params


def check_supported(gconfig: SamplingConfig, is_deterministic: bool, is_pipelined: bool) -> None:
    """Refuse what this engine would ignore or mean otherwise.

    Raises:
        DataError: with what to do instead.
    """
    if gconfig.seed is not None and not is_deterministic:
        raise DataError(
            f"seed={gconfig.seed} has no effect in this SGLang engine; start it with "
            "--enable-deterministic-inference, or send no seed"
        )
    if gconfig.repetition_penalty != 1.0:
        raise DataError(
            f"repetition_penalty={gconfig.repetition_penalty:g} would leave out the prompt in "
            "SGLang; take frequency_penalty or presence_penalty"
        )
    if is_pipelined and (gconfig.presence_penalty or gconfig.frequency_penalty):
        raise DataError(
            "presence_penalty and frequency_penalty come one token late in this SGLang engine; "
            "start it with --disable-overlap-schedule, or send none"
        )
    if gconfig.ignore_eos and gconfig.stop_token_ids and gconfig.min_new_tokens:
        raise DataError(
            "SGLang cannot hold back stop_token_ids for min_new_tokens under ignore_eos; "
            "leave one of the three out"
        )


def parse_line(line: bytes) -> EngineOutput | None:
    """An event of a stream; None for a line without one.

    Raises:
        ServiceError: the event is an error.
    """
    if not line.startswith(b"data:"):
        return None
    text = line.removeprefix(b"data:").strip()
    return None if text == LAST_LINE else parse_output(text, 200)


def parse_output(text: bytes, status: int) -> EngineOutput:
    """The body of an answer.

    Raises:
        DataError: SGLang refused the request.
        BackendError: it failed, or answered with something else.
    """
    try:
        body = json.loads(text)
        if status < 400 and "error" not in body:
            return EngineOutput(body["output_ids"], body["meta_info"])
    except (ValueError, KeyError, TypeError) as error:
        raise BackendError(f"SGLang answered {status} with no output: {text[:200]!r}") from error
    raise _refusal(body, status)


def _refusal(body: Any, status: int) -> ServiceError:
    error = body.get("error", body) if isinstance(body, dict) else body
    code = error.get("code", status) if isinstance(error, dict) else status
    message = error.get("message", error) if isinstance(error, dict) else error
    kind = DataError if isinstance(code, int) and 400 <= code < 500 else BackendError
    return kind(f"SGLang refused the request: {message}")


def find_stop(gconfig: SamplingConfig, tokens: Sequence[int], start: int) -> int | None:
    """Tokens up to and with the first stop token from `start` on, where SGLang does not look."""
    if not (gconfig.ignore_eos and gconfig.stop_token_ids):
        return None
    found = (i + 1 for i in range(start, len(tokens)) if tokens[i] in gconfig.stop_token_ids)
    return next(found, None)


def stop_of(output: EngineOutput, cut: int | None) -> tuple[StopReason, int | str | None]:
    """Why the output ended, and the token or string that ended it."""
    if cut is not None:
        return "stop", output.tokens[cut - 1]
    finish = output.finish
    if finish is None:
        raise BackendError("SGLang's answer ended before its output did")
    if finish["type"] == "stop":
        return "stop", finish.get("matched")
    return ("interrupt", None) if finish["type"] == "abort" else ("length", None)


def logprobs_of(output: EngineOutput) -> list[float]:
    """Return the logprobs of the tokens that have one: the last token of an aborted request may have
    none.

    Raises:
        BackendError: one is missing or not finite.
    """
    logprobs = [logprob for logprob, *_ in output.meta.get("output_token_logprobs", ())]
    if None in logprobs:
        raise BackendError("SGLang reported a logprob that is not finite; its weights are damaged")
    if len(logprobs) < len(output.tokens) and not output.is_aborted:
        raise BackendError(
            f"SGLang reported {len(logprobs)} logprobs for {len(output.tokens)} tokens"
        )
    return logprobs


def top_logprobs_of(output: EngineOutput, count: int) -> list[TopLogprobs]:
    """Return the top logprobs of the first `count` output tokens."""
    return [_pairs(row) for row in output.meta["output_top_logprobs"][:count]]


def expert_ids_of(output: EngineOutput) -> NDArray[np.int32] | None:
    """Return the routed experts, flat; None if SGLang sent none, as with most aborted requests.

    Raises:
        BackendError: they are damaged.
    """
    packed = output.meta.get("routed_experts")
    if packed is None:
        return None
    try:
        return np.frombuffer(base64.b64decode(packed, validate=True), "<i4")
    except (TypeError, ValueError) as error:
        raise BackendError(f"SGLang sent routed experts that cannot be read: {error}") from error


def prompt_logprobs_of(output: EngineOutput, req: LLMRequest) -> list[float | None] | None:
    """Return the logprobs of the prompt from `logprob_start` on, if requested; the first token has
    none.
    """
    rows = _scored(output, req, "input_token_logprobs")
    return None if rows is None else [logprob for logprob, *_ in rows]


def prompt_top_logprobs_of(
    output: EngineOutput, req: LLMRequest
) -> list[TopLogprobs | None] | None:
    """Return the top logprobs of the prompt; see `prompt_logprobs_of`."""
    rows = _scored(output, req, "input_top_logprobs") if req.top_logprobs else None
    return None if rows is None else [None if row is None else _pairs(row) for row in rows]


def _scored(output: EngineOutput, req: LLMRequest, column: str) -> list[Any] | None:
    if req.logprob_start is None or column not in output.meta:
        return None  # not asked for, or interrupted before the prompt was read
    skipped = req.logprob_start - _start_of_scores(req.logprob_start)
    return list(output.meta[column][skipped:])


def _start_of_scores(start: int) -> int:
    return max(0, start - 1)


def _pairs(row: Sequence[Sequence[Any]]) -> TopLogprobs:
    """What a grammar forbids has no logprob, and is no alternative."""
    return [
        (token, logprob)
        for logprob, token, *_ in row
        if logprob is not None and logprob > -math.inf
    ]


def version_runs(
    output: EngineOutput, count: int, lagging: Collection[PolicyVersion], default: PolicyVersion
) -> Runs:
    """Versions of the first `count` tokens.

    Args:
        output: a finished one.
        count: tokens to describe.
        lagging: versions that were swapped in while each sequence had a token in flight.
        default: of a server that reports no spans.
    """
    spans = output.meta.get("weight_versions") or [{"version": str(default), "start": 0}]
    starts = [
        (version, span["start"] + (version in lagging and span["start"] > 0))
        for span in spans
        for version in [parse_label(span["version"])]
    ]
    ends = [*(start for _, start in starts[1:]), count]
    bounded = [
        (version, start, min(end, count))
        for (version, start), end in zip(starts, ends, strict=True)
    ]
    return [run for run in bounded if run[1] < run[2]]


def parse_label(label: str) -> PolicyVersion:
    """The version that a label names.

    Raises:
        BackendError: it is none of ours: another client changed the weights.
    """
    if not label.isdecimal():
        raise BackendError(
            f"SGLang's weights are labelled {label!r}, which is no version: they were changed "
            "behind this server; restart the engine"
        )
    return int(label)
