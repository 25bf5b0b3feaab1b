"""Estimates of KL(policy || reference) from sampled tokens, and what steers their coefficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "abs"]

MAX_EXPONENT = 20.0
"""Bound on a log-ratio before it is exponentiated: e^20 is still finite and exact enough in float32."""
MAX_DISTANCE = 1e4
"""Bound on a gradient of k2, in nats: it only keeps infinite logprobs of masked tokens out of it."""


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    estimator: KLEstimator = "k3",
    bound: float = 10.0,
    straight_through: bool = False,
) -> Tensor:
    """Estimate KL(policy || reference) per token, under tokens that the policy sampled.

    With d = logprob - reference: k1 = d (unbiased), k2 = d²/2 (small variance; its gradient is that of
    the KL), k3 = e^-d - 1 + d (unbiased, never negative), abs = |d|.

    Args:
        logprobs, reference_logprobs: [T]; differentiable in the first.
        bound: on the absolute estimate; beyond it the estimate has no gradient.
        straight_through: the estimate's bounded value with the gradient of k2, which is d at any
            distance: a policy that went far from its reference is pulled back, too (verl's `k3+`). As a
            loss k1 has a gradient of expectation zero, and that of k3 belongs to the reverse direction.
    Returns:
        [T]; not masked.
    Source:
        J. Schulman, "Approximating KL Divergence" (2020); the gradients: arXiv:2506.09477.
    """
    distance = logprobs - reference_logprobs
    difference = distance.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    if estimator == "k1":
        estimate = difference
    elif estimator == "k2":
        estimate = difference.square() / 2
    elif estimator == "k3":
        estimate = (-difference).exp() - 1.0 + difference
    else:
        estimate = difference.abs()
    estimate = estimate.clamp(-bound, bound)
    if not straight_through:
        return estimate
    carrier = distance.clamp(-MAX_DISTANCE, MAX_DISTANCE)
    # The second term is 0 to the bit, and its gradient is that of carrier²/2.
    return estimate.detach() + carrier.detach() * (carrier - carrier.detach())


@dataclass(slots=True)
class FixedKL:
    """A coefficient that stays."""

    coef: float

    def update(self, kl: float, num_sequences: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the values that `state_dict` returned."""
        self.coef = state["coef"]


@dataclass(slots=True)
class AdaptiveKL:
    """A coefficient that keeps the KL near a target: it rises while the KL is above.

    (AReaL hands its controller the mean of the KL *rewards*, which are negative, so that its coefficient
    only ever falls; here it is the KL itself.)

    Source:
        Ziegler et al. (arXiv:1909.08593) 2.2.
    """

    coef: float
    target: float
    """Nats per token."""
    horizon: int
    """Sequences over which an error of 20 % or more moves the coefficient by about 20 %."""

    def update(self, kl: float, num_sequences: int) -> None:
        """Adapt the coefficient after a batch.

        Args:
            kl: mean estimate over all of the batch's actions nats per token.
            num_sequences: of the batch.
        """
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_sequences / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint; target and horizon are configuration."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the values that `state_dict` returned."""
        self.coef = state["coef"]
