"""The critic: loss of values, their normalisation, and how much they explain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithms.masked_statistics import MaskedStatistics


def value_losses(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    eps_clip: float | None = 0.5,
    huber_delta: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `max(loss(v, R), loss(clip(v), R))` per token; clip(v) stays within `eps_clip` of the old
    value.

    The larger of the two: a step that clipping would have spared is not rewarded. (The smaller one, or
    clipping the error, makes the critic blind on one side.)

    Args:
        values: [T], differentiable.
        old_values: [T], at the start of the step, normalised like `values`.
        returns: [T], normalised like `values`.
        eps_clip: None does not clip.
        huber_delta: beyond this error the loss is linear; None is half the square everywhere.
    Returns:
        [T], and bool [T] where the clipped value gave the loss. To be masked by `aggregate`.
    Source:
        PPO2 (OpenAI baselines); the value clipping of arXiv:2005.12729 2.
    """
    plain = _error_losses(values - returns, huber_delta)
    if eps_clip is None:
        return plain, torch.zeros_like(values, dtype=torch.bool)
    # Not old + clamp(difference): its rounding would make values within the range look clipped.
    moved = values.clamp(old_values - eps_clip, old_values + eps_clip)
    clipped = _error_losses(moved - returns, huber_delta)
    return torch.maximum(plain, clipped), clipped > plain


def _error_losses(errors: Tensor, huber_delta: float | None) -> Tensor:
    squares = errors.square() / 2
    if huber_delta is None:
        return squares
    size = errors.abs()
    return torch.where(size <= huber_delta, squares, huber_delta * (size - huber_delta / 2))


def explained_variance(errors: MaskedStatistics, returns: MaskedStatistics) -> float:
    """`1 - Var(return - value) / Var(return)`: 1 is perfect, 0 as good as a constant.

    Args:
        errors: of return - value under the mask, over the whole batch.
        returns: of the returns under the same mask.
    Returns:
        nan where all returns are equal: there is nothing to explain.
    """
    if returns.variance == 0.0:
        return float("nan")
    return 1.0 - errors.variance / returns.variance


@dataclass(slots=True)
class ValueNormalizer:
    """Running mean and spread of returns, in which a critic speaks.

    With `decay` an exponential average, debiased as Adam's; without, the mean of all seen so far. Before
    the first update the mean is 0, and the std `initial_std`. (AReaL starts from a std of 0.1, because
    its floor applies to no data as well, so that the first values are a tenth of the critic's.)

    Source:
        PopArt's statistics (arXiv:1602.07714) 2.1, as used by MAPPO (arXiv:2103.01955).
    """

    decay: float | None = 0.99995
    """None is the cumulative mean."""
    clip: float = 5.0
    """Bound on a normalised target."""
    min_variance: float = 0.01
    initial_std: float = 1.0
    """Standard deviation before the first update."""
    min_weight: float = 0.0
    """Lower bound of the divisor of the exponential average."""
    _mean: float = 0.0
    _square: float = 0.0
    _weight: float = 0.0
    """Sum of what the two averages hold: 1 - decay^n, or the count."""

    def update(self, returns: MaskedStatistics) -> None:
        """Take in a batch; call it after the batch's own values were denormalised.

        Args:
            returns: of the raw returns under the mask, over the whole batch; of nothing changes nothing.
        """
        if returns.count == 0:
            return
        square = returns.squares / returns.count
        if self.decay is None:
            self._mean += returns.total
            self._square += returns.squares
            self._weight += returns.count
        else:
            self._mean = self.decay * self._mean + (1 - self.decay) * returns.mean
            self._square = self.decay * self._square + (1 - self.decay) * square
            self._weight = self.decay * self._weight + (1 - self.decay)

    @property
    def mean(self) -> float:
        """0 before the first update."""
        return self._mean / self._divisor if self._weight else 0.0

    @property
    def std(self) -> float:
        """`initial_std` before the first update."""
        if not self._weight:
            return self.initial_std
        variance: float = max(self._square / self._divisor - self.mean**2, self.min_variance)
        return variance**0.5

    @property
    def _divisor(self) -> float:
        return self._weight if self.decay is None else max(self._weight, self.min_weight)

    def normalize(self, returns: Tensor) -> Tensor:
        """Targets for the critic, within ± `clip`."""
        return ((returns - self.mean) / self.std).clamp(-self.clip, self.clip)

    def denormalize(self, values: Tensor) -> Tensor:
        """Convert the critic's values to units of the rewards."""
        return values * self.std + self.mean

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint; decay and bounds are configuration."""
        return {"mean": self._mean, "square": self._square, "weight": self._weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the values that `state_dict` returned."""
        self._mean, self._square = state["mean"], state["square"]
        self._weight = state["weight"]
