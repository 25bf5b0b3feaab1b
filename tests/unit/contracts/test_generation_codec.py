"""A generation as columns: what comes out is what went in, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from headway.contracts.generation_codec import decode_response, encode_response, num_values
from headway.contracts.routed_experts import UNKNOWN, RoutedExperts
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import LLMResponse

TOKENS = 5


def response(**changes: Any) -> LLMResponse:
    fields: dict[str, Any] = {
        "rid": "r",
        "output_tokens": [7, 0, 9, 2**31 - 1, 3],
        "output_logprobs": [-0.1, 0.0, -1e-30, -12.345678901234567, -1e9],
        "version_runs": [(3, 0, 2), (4, 2, TOKENS)],
        "stop_reason": "stop",
        "stop_match": "</s>",
        "latency_s": 0.25,
        "ttft_s": 0.125,
        "top_logprobs": [[(7, -0.1), (8, -2.5)]] * TOKENS,
        "prompt_logprobs": [None, -0.5],
        "cached_tokens": 16,
        "num_recomputes": 1,
    }
    return LLMResponse(**(fields | changes))


def experts(largest: int, num_tokens: int = 6) -> RoutedExperts:
    ids = np.random.default_rng(0).integers(0, largest, (num_tokens, 3, 2), np.int16)
    ids[0, 1, 1] = UNKNOWN
    return RoutedExperts(ids)


MASK = SamplingMask.of([np.array(ids, np.int32) for ids in ([7], [], [9, 11], [2**31 - 1], [3])])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"output_tokens": [], "output_logprobs": [], "version_runs": []},
        {"sampling_mask": MASK},
        {"sampling_mask": SamplingMask.whole(TOKENS)},
        {"routed_experts": experts(250)},
        {"routed_experts": experts(2000)},
        {"routed_experts": experts(8, num_tokens=1), "sampling_mask": MASK, "top_logprobs": None},
    ],
)
def test_what_comes_out_is_what_went_in(changes):
    before = response(**changes)
    after = decode_response(encode_response(before))
    assert after == before
    assert after.model_dump_json() == before.model_dump_json()
    assert after == LLMResponse.from_response(before.model_dump_json().encode())


def test_an_id_takes_the_bytes_that_it_needs():
    few, many = (
        encode_response(response(routed_experts=experts(largest, 1000))) for largest in (250, 2000)
    )
    assert len(many) - len(few) == pytest.approx(6000, abs=16)


def test_its_values_are_counted():
    assert num_values(response()) == TOKENS
    assert num_values(response(sampling_mask=MASK, routed_experts=experts(8))) == TOKENS + 5 + 36


def test_a_field_that_a_newer_server_adds_is_left_out():
    content = encode_response(response())
    fields = response().model_dump_json()
    newer = save(load(content), {"response": fields[:-1] + ',"mood":"good"}'})
    assert decode_response(newer) == response()


def columns(**changes: Any) -> bytes:
    """A whole response but for these columns; None leaves one out."""
    whole = response(routed_experts=experts(8), sampling_mask=MASK)
    there = {**load(encode_response(whole)), **changes}
    fields = response().model_dump_json(exclude={"output_tokens", "output_logprobs"})
    return save(
        {name: each for name, each in there.items() if each is not None}, {"response": fields}
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "0 bytes are no generation"),
        (b"{}", "2 bytes are no generation"),
        (encode_response(response())[:-1], "are no generation"),
        (save({}, {}), "are no generation"),
        (save({"output_tokens": np.zeros(1, np.int32)}, {"response": "[]"}), "are no generation"),
        (save({"output_tokens": np.zeros(1, np.int32)}, {"response": "{"}), "EOF"),
        (columns(output_tokens=None), "output_tokens"),
        (columns(output_tokens=np.zeros(3, np.int64)), r"'output_tokens' is int64\[3\]"),
        (columns(output_logprobs=np.zeros((3, 1))), r"'output_logprobs' is float64\[3, 1\]"),
        (columns(output_logprobs=np.full(3, np.nan)), "finite"),
        (columns(mask_tokens=None), "mask_tokens"),
        (columns(mask_counts=np.zeros(3, np.uint8)), r"'mask_counts' is uint8\[3\]"),
        (columns(experts=np.zeros((3, 1), np.uint8)), r"'experts' is uint8\[3, 1\]"),
        (columns(experts=np.zeros((3, 1, 1), np.int8)), r"'experts' is int8\[3, 1, 1\]"),
        (columns(experts=np.zeros((3, 0, 1), np.uint8)), r"'experts' is uint8\[3, 0, 1\]"),
    ],
)
def test_what_is_none_is_an_error_that_says_why(content, told):
    with pytest.raises(ValueError, match=told):
        decode_response(content)
