"""Advantage estimators by `type`, each with its own settings; installed packages add more."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from headway.contracts.config.base import Config, PluginConfig


class AdvantageSettings(Config):
    """Base of the settings of the estimators below."""

    critic: ClassVar[Literal["unused", "needed", "optional"]] = "unused"
    """Whether the estimator reads a critic's values."""
    compares_trajectories: ClassVar[bool] = True
    """The rewards of whole trajectories are compared, so that actions have none of their own."""


class GRPOAdvantageConfig(AdvantageSettings):
    """Rewards centred and scaled within their group (arXiv:2402.03300); its settings give Dr. GRPO
    (arXiv:2503.20783), RLOO (arXiv:2402.14740) and LitePPO (arXiv:2508.08221), too."""

    type: Literal["grpo"] = "grpo"
    mean_level: Literal["group", "batch"] = "group"
    """Rewards are centred at the mean of their group, or of all trajectories."""
    leave_one_out: bool = False
    """The mean is that of the others, without the trajectory itself (RLOO)."""
    std_level: Literal["group", "batch", "none"] = "group"
    """Centred rewards are divided by the standard deviation of their group, of all rewards (LitePPO), or
    not at all (Dr. GRPO, RLOO)."""
    unbiased_std: bool = True
    """Divide the squares of that deviation by one less than the number of rewards (TRL, verl,
    AReaL); false divides by their number. In groups of one size it is a constant factor."""

    @model_validator(mode="after")
    def _check_std(self) -> GRPOAdvantageConfig:
        if self.std_level == "none" and not self.unbiased_std:
            raise ValueError(
                "unbiased_std=false divides nothing beside std_level=none; leave it out"
            )
        return self


class RewardAdvantageConfig(AdvantageSettings):
    """The reward itself, without a baseline (REINFORCE++, arXiv:2501.03262, with
    `advantage_norm: batch`)."""

    compares_trajectories: ClassVar[bool] = False

    type: Literal["reward"] = "reward"


class OPOAdvantageConfig(AdvantageSettings):
    """OPO (arXiv:2505.23585): less the mean of the group, weighted by the lengths of the responses."""

    type: Literal["opo"] = "opo"


class GPGAdvantageConfig(AdvantageSettings):
    """GPG (arXiv:2504.02546): less the mean of the group, and larger by as much as the batch holds
    groups whose rewards are all equal; with `policy_loss: {type: reinforce}`."""

    type: Literal["gpg"] = "gpg"


class MaxRLAdvantageConfig(AdvantageSettings):
    """MaxRL (arXiv:2602.02710): less the mean of the group, in units of that mean; of rewards that are
    not negative."""

    type: Literal["maxrl"] = "maxrl"


class ReMaxAdvantageConfig(AdvantageSettings):
    """ReMax (arXiv:2310.10505): less the reward of the group's greedy sample, which
    `rollout.workflow.args.greedy_first` asks for."""

    type: Literal["remax"] = "remax"


class GAEAdvantageConfig(AdvantageSettings):
    """Generalised advantages (arXiv:1506.02438) from a critic's values."""

    critic: ClassVar[Literal["unused", "needed", "optional"]] = "needed"
    compares_trajectories: ClassVar[bool] = False

    type: Literal["gae"] = "gae"
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """0 trusts the critic after one action, 1 only what was earned."""


class PluginAdvantageConfig(PluginConfig):
    """An estimator of an installed package (entry point `headway.advantage_estimators`) or of a module;
    with a critic and without."""

    critic: ClassVar[Literal["unused", "needed", "optional"]] = "optional"
    compares_trajectories: ClassVar[bool] = False


def _named_unless(kind: str) -> BeforeValidator:
    def name(given: object) -> object:
        return {"type": kind, **given} if isinstance(given, dict) else given

    return BeforeValidator(name)


_AnyAdvantage = Annotated[
    GRPOAdvantageConfig
    | RewardAdvantageConfig
    | OPOAdvantageConfig
    | GPGAdvantageConfig
    | MaxRLAdvantageConfig
    | ReMaxAdvantageConfig
    | GAEAdvantageConfig
    | PluginAdvantageConfig,
    Field(discriminator="type"),
]
AdvantageConfig = Annotated[_AnyAdvantage, _named_unless("grpo")]
CriticAdvantageConfig = Annotated[_AnyAdvantage, _named_unless("gae")]
