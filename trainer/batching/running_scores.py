"""A score after every token, of trajectories whose turns were scored as they went."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.contracts.types import Trajectory


def running_scores(trajectories: Sequence[Trajectory]) -> Tensor:
    """Return the reward that a trajectory has earned up to and including each of its tokens.

    From the last token of a turn on, what that turn alone earned counts; where no turn has a reward of
    its own, the trajectory's counts from its last sampled token on.

    Returns:
        [T] float32 over all tokens, not shifted: the column `dense_scores`.
    """
    return torch.cat([_of_one(trajectory) for trajectory in trajectories])


def _of_one(trajectory: Trajectory) -> Tensor:
    scores = torch.zeros(trajectory.num_tokens, dtype=torch.float32)
    earned = [(turn.end - 1, turn.reward) for turn in trajectory.turns if turn.reward is not None]
    sampled = trajectory.loss_mask.nonzero()[0]
    if not earned and len(sampled):
        earned = [(int(sampled[-1]), trajectory.reward)]
    for position, reward in earned:
        scores[position:] += reward
    return scores
