"""Policy losses by `type`, each with its own settings; installed packages add more."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from headway.contracts.config.base import Config, PluginConfig


class PolicyLossSettings(Config):
    """Base of the settings of the losses below."""

    needs_behaviour_ratio: ClassVar[bool] = False
    """The trust region is around the policy that sampled, so `decoupled` has to be false."""
    has_sequence_ratio: ClassVar[bool] = True
    """The loss reads a ratio, which `ratio_level` may take of whole sequences."""
    asks_policy_first: ClassVar[bool] = False
    """The loss looks at the policy's logprobs of the whole batch, before the first update."""


class ClipRangeSettings(PolicyLossSettings):
    """Base of the losses that clip the ratio."""

    eps_clip: float = Field(0.2, gt=0.0, le=1.0)
    """Lower and, without `eps_clip_higher`, upper clip range of the ratio; 1 has no lower bound."""
    eps_clip_higher: float | None = Field(None, gt=0.0)
    """Upper clip range of its own (DAPO, arXiv:2503.14476); None takes `eps_clip`."""


class ClipLossConfig(ClipRangeSettings):
    """PPO (arXiv:1707.06347): the minimum of plain and clipped ratio · advantage."""

    type: Literal["clip"] = "clip"
    dual_clip: float | None = Field(None, gt=1.0)
    """Bound on the ratio where the advantage is negative (arXiv:1912.09729); None has none."""


class UnclippedLossConfig(PolicyLossSettings):
    """Ratio · advantage, without a bound."""

    type: Literal["unclipped"] = "unclipped"


class ReinforceLossConfig(PolicyLossSettings):
    """Logprob · advantage, without a ratio (REINFORCE; GPG, arXiv:2504.02546)."""

    has_sequence_ratio: ClassVar[bool] = False

    type: Literal["reinforce"] = "reinforce"


class CISPOLossConfig(ClipRangeSettings):
    """CISPO (arXiv:2506.13585): the ratio weighs the gradient; it is clipped, the gradient is not."""

    type: Literal["cispo"] = "cispo"


class SAPOLossConfig(PolicyLossSettings):
    """SAPO (arXiv:2511.20347): a soft gate around the policy that sampled."""

    needs_behaviour_ratio: ClassVar[bool] = True

    type: Literal["sapo"] = "sapo"
    temperature_positive: float = Field(1.0, gt=0.0)
    """Steepness of the gate where the advantage is positive."""
    temperature_negative: float = Field(1.05, gt=0.0)
    """Steepness of the gate elsewhere."""


class GMPOLossConfig(PolicyLossSettings):
    """GMPO (arXiv:2507.20673): the geometric mean over a sequence of its tokens' clipped ratios."""

    has_sequence_ratio: ClassVar[bool] = False

    type: Literal["gmpo"] = "gmpo"
    eps_clip: float = Field(0.4, gt=0.0)
    """A token's ratio stays within e^±this before the mean."""
    eps_clip_higher: float | None = Field(None, gt=0.0)
    """Upper range of its own, in the exponent; None takes `eps_clip`."""


class DPPOLossConfig(PolicyLossSettings):
    """DPPO (arXiv:2602.04879): leave out tokens whose probability moved too far from the sampling
    policy's, in the direction of their advantage; in place of a bound on the ratio."""

    needs_behaviour_ratio: ClassVar[bool] = True
    has_sequence_ratio: ClassVar[bool] = False

    type: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """Distance of sampling policy and policy, of the token against all others: difference of its
    probabilities, or KL in nats (0.05 is usual then)."""
    max_divergence_higher: float = Field(0.2, ge=0.0)
    """Tokens with a positive advantage leave beyond this distance, if they have grown likelier."""
    max_divergence_lower: float = Field(0.2, ge=0.0)
    """Tokens with a negative advantage leave beyond this distance, if they have grown less likely."""
    square_coef: float = Field(0.0, ge=0.0)
    """Weight of log(policy / sampling policy)², which holds every token back (prime-rl: 0.001)."""


class ClipCovLossConfig(ClipRangeSettings):
    """Clip-Cov (arXiv:2505.22617): PPO without gradient of a few tokens whose logprob and advantage are
    high together, which would cost the most entropy."""

    asks_policy_first: ClassVar[bool] = True

    type: Literal["clip_cov"] = "clip_cov"
    share: float = Field(2e-4, gt=0.0, le=1.0)
    """Share of the batch's tokens that are left out, drawn from those within the bounds below."""
    covariance_lower: float = 1.0
    """Lower bound of centred logprob · centred advantage of the tokens that are drawn from."""
    covariance_upper: float = 5.0
    """Upper bound of the same."""

    @model_validator(mode="after")
    def _check_bounds(self) -> ClipCovLossConfig:
        low, high = self.covariance_lower, self.covariance_upper
        if low >= high:
            raise ValueError(f"covariance_lower={low} is not below covariance_upper={high}")
        return self


class KLCovLossConfig(PolicyLossSettings):
    """KL-Cov (arXiv:2505.22617): ratio · advantage, with a penalty on the tokens whose logprob and
    advantage are highest together."""

    asks_policy_first: ClassVar[bool] = True

    type: Literal["kl_cov"] = "kl_cov"
    share: float = Field(2e-4, gt=0.0, le=1.0)
    """Share of the batch's tokens that are held back, those of the largest covariance."""
    penalty_coef: float = Field(1.0, gt=0.0)
    """Weight of |log(policy / proximal)| on these tokens, in nats."""


class PluginLossConfig(PluginConfig):
    """A loss of an installed package (entry point `headway.policy_losses`) or of a module."""

    needs_behaviour_ratio: ClassVar[bool] = False
    has_sequence_ratio: ClassVar[bool] = True

    asks_policy_first: bool = False
    """Ask the policy for its logprobs of the whole batch before the first update, for the loss's
    `prepare`."""


def _clip_unless_named(given: object) -> object:
    return {"type": "clip", **given} if isinstance(given, dict) else given


PolicyLossConfig = Annotated[
    Annotated[
        ClipLossConfig
        | UnclippedLossConfig
        | ReinforceLossConfig
        | CISPOLossConfig
        | SAPOLossConfig
        | GMPOLossConfig
        | DPPOLossConfig
        | ClipCovLossConfig
        | KLCovLossConfig
        | PluginLossConfig,
        Field(discriminator="type"),
    ],
    BeforeValidator(_clip_unless_named),
]
