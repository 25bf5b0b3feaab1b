"""Group-relative policy optimisation with the decoupled PPO loss."""

from __future__ import annotations

from pydantic import Field

from headway.contracts.config.base import Config


class AlgorithmConfig(Config):
    eps_clip: float = Field(0.2, gt=0.0, lt=1.0)
    """Lower and, without `eps_clip_higher`, upper clip range of the ratio (PPO, arXiv:1707.06347)."""
    eps_clip_higher: float | None = Field(None, gt=0.0)
    """Upper clip range of its own (DAPO, arXiv:2503.14476); None takes `eps_clip`."""
    decoupled: bool = True
    """Clip around the proximal policy and weigh by proximal / behaviour (AReaL, arXiv:2505.24298);
    false clips around the behaviour policy itself."""
    behaviour_weight_cap: float | None = Field(5.0, gt=0.0)
    """Tokens with proximal / behaviour above this get weight 0; None keeps all. Needs `decoupled`."""
    scale_by_std: bool = True
    """Divide centred rewards by the group's standard deviation (GRPO); false only centres (Dr. GRPO)."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps per version."""
    mask_truncated: bool = False
    """Leave trajectories that ran into `max_new_tokens` out of the loss."""
    reward_scaling: float = 1.0
    """Factor on the score, after `reward_bias`."""
    reward_bias: float = 0.0
    """Added to the score before scaling."""
    reward_clip: float = Field(20.0, gt=0.0)
    """Bound on the absolute value of a reward."""
