from __future__ import annotations

import numpy as np
import pytest

from headway.contracts.types import Trajectory


@pytest.fixture
def make_trajectory():
    """A trajectory whose columns tell their position: prompt first, then sampled tokens."""

    def make(num_prompt=2, num_response=3, rollout="r0", sample=0, reward=0.0, stop="stop"):
        size = num_prompt + num_response
        sampled = np.arange(size) >= num_prompt
        return Trajectory(
            rollout_id=rollout,
            group_id=f"g-{rollout}",
            sample_index=sample,
            input_ids=np.arange(10, 10 + size, dtype=np.int32),
            loss_mask=sampled,
            logprobs=np.where(sampled, -0.5 - np.arange(size), 0.0).astype(np.float32),
            versions=np.where(sampled, np.arange(size) // 2, -1).astype(np.int32),
            reward=reward,
            stop_reason=stop,
        )

    return make
