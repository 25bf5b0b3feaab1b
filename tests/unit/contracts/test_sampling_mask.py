"""Masks travel bit by bit, join and are cut, and show when they cannot be those of their tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError
from pydantic_core import to_json

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.workers import WorkersConfig
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import LLMResponse
from headway.launch.quickstart.recipe import reinforce


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


MASK = SamplingMask.of([ids(3, 7, 2_000_000_000), ids(), ids(5)])


def response(mask: SamplingMask | None) -> LLMResponse:
    return LLMResponse(
        rid="r",
        output_tokens=[7, 1, 5],
        output_logprobs=[-1.0, -2.0, 0.0],
        version_runs=[(0, 0, 3)],
        stop_reason="length",
        latency_s=1.0,
        ttft_s=1.0,
        sampling_mask=mask,
    )


@pytest.mark.parametrize("mask", [MASK, SamplingMask.whole(3), None])
def test_a_mask_comes_back_from_json_as_it_was(mask):
    sent = response(mask)
    for body in (sent.model_dump_json(), to_json(sent)):
        assert LLMResponse.model_validate_json(body).sampling_mask == mask
    assert LLMResponse.model_validate(sent.model_dump()).sampling_mask == mask
    assert sent.model_copy().sampling_mask is mask


def test_json_holds_both_arrays_in_base64():
    told = json.loads(response(MASK).model_dump_json())["sampling_mask"]
    assert told == {"counts": "AwAAAAAAAAABAAAA", "tokens": "AwAAAAcAAAAAlDV3BQAAAA=="}


def test_half_an_integer_is_no_mask():
    body = json.loads(response(MASK).model_dump_json())
    body["sampling_mask"]["counts"] = "AwA="
    with pytest.raises(ValidationError, match="their bytes come in fours"):
        LLMResponse.model_validate_json(json.dumps(body))


def test_parts_join_and_are_cut():
    joined = SamplingMask.join([MASK, SamplingMask.whole(2), SamplingMask.of([ids(9)])])
    assert joined.counts.tolist() == [3, 0, 1, 0, 0, 1]
    assert joined.tokens.tolist() == [3, 7, 2_000_000_000, 5, 9]
    assert joined.first(3) == MASK
    assert joined.first(0) == SamplingMask.whole(0) == SamplingMask.of([])
    assert joined != MASK


@pytest.mark.parametrize(
    ("tokens", "mask", "problem"),
    [
        ([7, 1, 5], MASK, None),
        ([7, 1], MASK, "a sampling mask of 3 positions for 2 tokens"),
        ([7, 1, 6], MASK, "without the token 6 that was drawn at 2"),
        ([1, 1, 5], MASK, "without the token 1 that was drawn at 0"),
        ([7], SamplingMask(ids(2), ids(7)), "whose counts sum to another number"),
        ([7], SamplingMask(ids(-1), ids()), "-1 tokens at a position"),
        ([7], SamplingMask(ids(2), ids(7, 7)), "without the token 7"),
    ],
)
def test_a_mask_that_cannot_be_that_of_its_tokens_is_found(tokens, mask, problem):
    found = mask.problem(tokens)
    assert found is None if problem is None else problem in found


@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        ({}, False),
        ({"temperature": 0.5}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.99}, True),
        ({"min_p": 0.01}, True),
        ({"top_p": 0.9, "temperature": 0.0}, False),
    ],
)
def test_greedy_and_whole_sampling_cut_nothing(options, cuts):
    assert SamplingConfig(**options).cuts_distribution is cuts


def test_workers_refuse_to_replay_what_they_do_not_pass_on():
    tree = {"model": {"path": "m"}, "sampling": {"top_k": 5}}
    with pytest.raises(ValidationError, match="workers pass on no sampling masks"):
        WorkersConfig.model_validate(tree)
    ignoring = AlgorithmConfig(sampling_mask="ignore")
    assert WorkersConfig.model_validate({**tree, "algorithm": ignoring.model_dump()})


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_a_run_refuses_to_replay_what_its_servers_do_not_report(tmp_path, backend):
    tree = reinforce(tmp_path, 1, 0, 0, 1, False).model_dump()
    tree["server"]["backend"] = {"type": backend}
    assert LaunchConfig.model_validate(tree)
    tree["trainer"]["sampling"]["top_p"] = 0.9
    with pytest.raises(ValidationError, match=f"type={backend} reports no sampling masks"):
        LaunchConfig.model_validate(tree)
    tree["trainer"]["algorithm"]["sampling_mask"] = "ignore"
    assert LaunchConfig.model_validate(tree)
