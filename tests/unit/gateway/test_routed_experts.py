"""Rollouts that ask for routed experts: they are stored with the trajectory, over all turns."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.trajectories.sample import Sample
from gateway.trajectories.transcript import Transcript
from headway.contracts.errors import RolloutsFailed
from headway.contracts.routed_experts import RoutedExperts
from headway.contracts.types import LLMResponse, Prompt, RewardResult


def experts(*ids: int) -> RoutedExperts:
    return RoutedExperts(np.array(ids, np.int16).reshape(-1, 1, 1))


def response(tokens: list[int], routed: RoutedExperts | None) -> LLMResponse:
    return LLMResponse(
        rid="r",
        output_tokens=tokens,
        output_logprobs=[-1.0] * len(tokens),
        version_runs=[(0, 0, len(tokens))],
        stop_reason="stop",
        latency_s=1.0,
        ttft_s=1.0,
        routed_experts=routed,
    )


def test_each_turn_adds_the_tokens_that_no_turn_before_it_had() -> None:
    transcript = Transcript([1, 2])
    transcript.sample(response([3, 4], experts(10, 11, 12)))
    transcript.observe([5])
    transcript.sample(response([6, 7], experts(0, 0, 0, 13, 14, 15)))
    prompt = Prompt(group_id="g", input_ids=(1, 2))
    row = transcript.trajectory(Sample("a", prompt, 0), RewardResult(1.0))
    assert row.routed_experts == experts(10, 11, 12, 13, 14, 15)
    assert row.num_tokens == 7


async def test_a_server_that_reports_none_fails_the_rollout(open_service) -> None:
    asked = []

    async def answer(req, attempt):
        asked.append(req.routed_experts)
        return [7, 8]

    bench = await open_service(answer, error_budget=9)
    await bench.submit("plain")
    (group,) = await bench.wait(1)
    assert group.trajectories[0].routed_experts is None
    await bench.submit("a", routed_experts=True)
    with pytest.raises(RolloutsFailed, match=r"algorithm\.routed_experts=ignore"):
        await bench.wait(1, "d1", rollout_ids=("a",))
    assert asked == [False, True]
