"""The factor on losses that keeps gradients of float16 passes within range, found while training.

Every rank computes the same from the gradient norm over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from headway.contracts.config.optimizer import OptimizerConfig
from trainer.backends.gradients import scale_gradients

FACTOR = 2.0
"""The scale doubles and halves."""


class LossScale:
    """A dynamic loss scale (mixed precision training, arXiv:1710.03740), with hysteresis."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.value = config.initial_loss_scale
        """Factor on the next step's loss."""
        self._lowest = config.min_loss_scale
        self._window = config.loss_scale_window
        self._patience = config.hysteresis
        self._clean_steps = 0
        self._overflows_left = self._patience

    def update(self, is_finite: bool) -> None:
        """Take a step into account.

        Args:
            is_finite: False if a gradient overflowed, and the step was skipped.
        """
        if not is_finite:
            self._clean_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.value = max(self.value / FACTOR, self._lowest)
            return
        self._clean_steps += 1
        if self._clean_steps == self._window:
            self._clean_steps = 0
            self._overflows_left = self._patience
            self.value *= FACTOR

    @property
    def notes(self) -> dict[str, Any]:
        """Plain values for checkpoints, always with the same keys."""
        return {
            "loss_scale": self.value,
            "loss_scale_clean_steps": self._clean_steps,
            "loss_scale_overflows_left": self._overflows_left,
        }

    def restore(self, notes: dict[str, Any]) -> None:
        """Take the values of `notes` back."""
        self.value = float(notes["loss_scale"])
        self._clean_steps = int(notes["loss_scale_clean_steps"])
        self._overflows_left = int(notes["loss_scale_overflows_left"])


def scale_back(
    parameters: Iterable[Tensor], scale: LossScale, grad_norm: float
) -> dict[str, float]:
    """Take the scale off all gradients, in place, and let it learn from the step.

    Args:
        grad_norm: of the scaled gradients, over all shards.
    Returns:
        `grad_norm` of what is left, and the step's `loss_scale`.
    """
    used, is_finite = scale.value, math.isfinite(grad_norm)
    if is_finite:
        scale_gradients(parameters, 1.0 / used)
    scale.update(is_finite)
    return {"grad_norm": grad_norm / used, "loss_scale": used}
