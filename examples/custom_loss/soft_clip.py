"""A policy loss and an advantage estimator of one's own, each with its settings."""

import torch
from pydantic import Field
from torch import Tensor

from headway.contracts.config.base import Config
from trainer.algorithms.advantage_registry import (
    AdvantageEstimator,
    Advantages,
    RewardedBatch,
    register_advantage_estimator,
)
from trainer.algorithms.policy_loss_registry import (
    PolicyLoss,
    PolicyTokens,
    register_policy_loss,
)


class SoftClipArgs(Config):
    sharpness: float = Field(4.0, gt=0.0)
    """How fast the gradient falls while policy and proximal policy part."""


def soft_clip(args: SoftClipArgs, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Ratio · advantage, weighed down smoothly by the distance of the two policies."""
    distance = args.sharpness * tokens.log_ratios.detach()
    weight = torch.exp(-distance.square())
    return -weight * tokens.ratio * tokens.advantages, weight < 0.5


class RankArgs(Config):
    """It has no settings."""


def rank(args: RankArgs, batch: RewardedBatch) -> Advantages:
    """Siblings by their order: from -1 for the worst of a group to 1 for the best."""
    siblings = batch.group_ids[:, None] == batch.group_ids[None, :]
    above = batch.rewards[:, None] - batch.rewards[None, :]
    order = (siblings * above.sign()).sum(1) / (siblings.sum(1) - 1).clamp(min=1)
    return Advantages(batch.per_token(order))


register_policy_loss("soft_clip", PolicyLoss(soft_clip, SoftClipArgs))
register_advantage_estimator("rank", AdvantageEstimator(rank, RankArgs))
