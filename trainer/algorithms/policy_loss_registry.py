"""Policy losses by name: what one sees of a micro-batch, and how a package adds its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from headway.contracts.config.base import Config
from headway.contracts.config.policy_losses import PolicyLossConfig
from headway.contracts.registry import Registry
from headway.contracts.types import PolicyVersion
from headway.runtime.plugins import chosen_part
from trainer.algorithms.segments import Segments

PREPARED = "prepared"
"""Column of what a policy loss's `prepare` returned."""


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """What a policy loss sees of a micro-batch; everything is 0 outside of the mask."""

    logprobs: Tensor
    """[T] under the current policy, differentiable."""
    log_ratios: Tensor
    """[T] log(policy / proximal), or of its sequence with `ratio_level: sequence`; differentiable."""
    ratio: Tensor
    """[T] its exponential, between e^-20 and e^20; differentiable."""
    proximal_logprobs: Tensor
    """[T] of the policy that the trust region is around; the behaviour policy's unless `decoupled`."""
    advantages: Tensor
    """[T]"""
    loss_mask: Tensor
    """[T] bool, true = in the loss."""
    sequences: Segments
    """Sequence of each token."""
    prepared: Tensor | None
    """[T], what the loss's `prepare` returned for these tokens."""


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """What `prepare` sees of a whole batch, before the first update; the same on every rank."""

    logprobs: Tensor
    """[T] of the proximal policy if it was asked, else of the behaviour policy."""
    advantages: Tensor
    """[T]"""
    loss_mask: Tensor
    """[T] bool, true = in the loss."""
    sequences: Segments
    """Sequence of each token."""
    version: PolicyVersion
    """Version that the step starts from, which may seed what is drawn."""


TokenLosses = tuple[Tensor, Tensor]
"""[T] losses, and bool [T] that is true where a bound took the gradient."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss of single tokens. The corrections for the behaviour policy weigh it, and `aggregation`
    reduces it to one number."""

    compute: Callable[[Any, PolicyTokens], TokenLosses]
    """`(args, tokens) -> (losses [T], is_clipped [T])`; values outside of the mask do not count."""
    Args: type[BaseModel] = Config
    """Model of its settings."""
    prepare: Callable[[Any, BatchTokens], Tensor] | None = None
    """`(args, tokens) -> [T]`, for losses that compare the tokens of a whole batch: a micro-batch's
    would depend on how the batch was cut."""


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss",
    {
        "clip": "trainer.algorithms.policy_losses:CLIP",
        "unclipped": "trainer.algorithms.policy_losses:UNCLIPPED",
        "reinforce": "trainer.algorithms.policy_losses:REINFORCE",
        "cispo": "trainer.algorithms.policy_losses:CISPO",
        "sapo": "trainer.algorithms.policy_losses:SAPO",
        "gmpo": "trainer.algorithms.policy_losses:GMPO",
        "dppo": "trainer.algorithms.policy_losses:DPPO",
        "clip_cov": "trainer.algorithms.policy_losses:CLIP_COV",
        "kl_cov": "trainer.algorithms.policy_losses:KL_COV",
    },
    entry_point_group="headway.policy_losses",
)


def register_policy_loss(name: str, target: str | PolicyLoss) -> None:
    """Add a policy loss, or `"module:attribute"` for a lazy one.

    Raises:
        ConfigError: the name is taken.
    """
    POLICY_LOSSES.register(name, target)


def chosen_policy_loss(config: PolicyLossConfig) -> tuple[PolicyLoss, Any]:
    """Return the loss that a configuration chooses, and its settings.

    Raises:
        UnknownName: no loss is registered under the name.
        ConfigError: the settings do not fit.
    """
    return chosen_part(POLICY_LOSSES, config)
