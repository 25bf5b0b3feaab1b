"""Routed experts travel bit by bit, one byte each where that is enough, and join along a sequence."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError
from pydantic_core import to_json

from headway.contracts.codec import decode_groups, encode_groups, join_payloads
from headway.contracts.errors import DataError
from headway.contracts.routed_experts import UNKNOWN, RoutedExperts, join_experts
from headway.contracts.types import LLMResponse, Trajectory, TrajectoryGroup


def experts(num_tokens: int, highest: int = 127, seed: int = 0) -> RoutedExperts:
    """Of 3 layers and 2 experts each; some unknown."""
    drawn = np.random.default_rng(seed).integers(
        UNKNOWN, highest, (num_tokens, 3, 2), endpoint=True
    )
    return RoutedExperts(drawn.astype(np.int16))


def response(routed: RoutedExperts | None) -> LLMResponse:
    return LLMResponse(
        rid="r",
        output_tokens=[7, 1],
        output_logprobs=[-1.0, -2.0],
        version_runs=[(0, 0, 2)],
        stop_reason="length",
        latency_s=1.0,
        ttft_s=1.0,
        routed_experts=routed,
    )


@pytest.mark.parametrize("highest", [3, 254, 255, 256, 32767])
def test_json_brings_them_back_in_as_many_bytes_as_they_need(highest: int) -> None:
    routed = experts(9, highest)
    routed.experts[0, 0, 0] = highest
    sent = response(routed)
    for body in (sent.model_dump_json(), to_json(sent)):
        assert LLMResponse.model_validate_json(body).routed_experts == routed
    assert LLMResponse.model_validate(sent.model_dump()).routed_experts == routed
    packed = routed.pack()
    assert len(packed.experts) == 9 * 3 * 2 * packed.width
    assert packed.width == (1 if highest < 255 else 2)


def test_a_part_of_a_token_is_refused() -> None:
    body = json.loads(response(experts(2)).model_dump_json())
    body["routed_experts"]["top_k"] = 5
    with pytest.raises(ValidationError, match="12 bytes of routed experts are not of whole tokens"):
        LLMResponse.model_validate_json(json.dumps(body))


def test_a_later_request_adds_what_came_after() -> None:
    whole = experts(10)
    again = RoutedExperts(np.zeros_like(whole.experts))  # the prompt was computed once more
    again.experts[6:] = whole.experts[6:]
    assert join_experts([whole.first(6), None, again]) == whole
    assert join_experts([None, None]) is None
    assert len(whole.first(4)) == 4


def row(index: int, num_tokens: int, routed: RoutedExperts | None) -> Trajectory:
    return Trajectory(
        rollout_id="a",
        group_id="g",
        sample_index=index,
        input_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=np.ones(num_tokens, np.bool_),
        logprobs=np.zeros(num_tokens, np.float32),
        versions=np.zeros(num_tokens, np.int32),
        reward=0.0,
        stop_reason="stop",
        routed_experts=routed,
    )


def payload_of(*routed: RoutedExperts | None) -> bytes:
    rows = tuple(row(index, 5, each) for index, each in enumerate(routed))
    return encode_groups([TrajectoryGroup("a", "g", rows)])


def test_a_payload_holds_them_where_there_are_some() -> None:
    first, second = (experts(4), None, experts(2, 300)), (None, experts(0))
    for parts in ((first,), (second,), (first, second)):
        payload = join_payloads([payload_of(*part) for part in parts])
        decoded = [t.routed_experts for group in decode_groups(payload) for t in group.trajectories]
        assert decoded == [each for part in parts for each in part]


@pytest.mark.parametrize("num_tokens", [4, 6])
def test_more_than_the_bytes_or_the_tokens_is_refused(num_tokens: int) -> None:
    payload = payload_of(experts(3))
    damaged = payload.replace(b"[[3,3,2,1]]", b"[[%d,3,2,1]]" % num_tokens)
    assert damaged != payload
    with pytest.raises(DataError, match="routed experts"):
        decode_groups(damaged)
