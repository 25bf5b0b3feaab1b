"""Small valid records for tests, by the few values that a test cares about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.contracts.config.base import ComponentConfig
from headway.contracts.types import (
    LLMRequest,
    LLMResponse,
    Prompt,
    RolloutRequest,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)


def make_trajectory(
    rollout_id: str = "r0",
    sample_index: int = 0,
    versions: Sequence[int] = (0, 0),
    reward: float = 1.0,
    stop_reason: StopReason = "stop",
    logprobs: Sequence[float] | None = None,
) -> Trajectory:
    """One prompt token, then one sampled token per version."""
    sampled = [-0.5] * len(versions) if logprobs is None else list(logprobs)
    return Trajectory(
        rollout_id=rollout_id,
        group_id=f"g-{rollout_id}",
        sample_index=sample_index,
        input_ids=np.arange(1 + len(versions), dtype=np.int32),
        loss_mask=np.array([False] + [True] * len(versions)),
        logprobs=np.array([0.0, *sampled], dtype=np.float32),
        versions=np.array([-1, *versions], dtype=np.int32),
        reward=reward,
        stop_reason=stop_reason,
    )


def make_group(rollout_id: str = "r0", size: int = 2, version: int = 0) -> TrajectoryGroup:
    """A finished group, every token of one version."""
    return TrajectoryGroup(
        rollout_id,
        f"g-{rollout_id}",
        tuple(make_trajectory(rollout_id, index, (version, version)) for index in range(size)),
    )


def make_request(rollout_id: str = "r0", size: int = 2, **fields: Any) -> RolloutRequest:
    """A group to play: token ids as prompt, `exact` as reward."""
    fields = {"reward": ComponentConfig(name="exact"), **fields}
    prompt = fields.pop("prompt", None) or Prompt(
        group_id=f"g-{rollout_id}", group_size=size, input_ids=(1, 2, 3), data={"answer": "x"}
    )
    return RolloutRequest(rollout_id=rollout_id, prompt=prompt, **fields)


def make_response(req: LLMRequest, tokens: Sequence[int], version: int = 0) -> LLMResponse:
    """What a generator answers."""
    return LLMResponse(
        rid=req.rid,
        output_tokens=list(tokens),
        output_logprobs=[-0.25] * len(tokens),
        version_runs=[(version, 0, len(tokens))],
        stop_reason="stop",
        latency_s=0.0,
        ttft_s=0.0,
    )
