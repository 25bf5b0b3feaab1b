"""The optimizer, its schedule, and the scale of losses in float16."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headway.contracts.config.base import Config


class OptimizerConfig(Config):
    type: Literal["adam", "empty"] = "adam"
    """`adam` is AdamW; `empty` holds nothing and trains nothing, for models that are only asked."""
    lr: float = Field(1e-5, gt=0.0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0.0)
    """Added to the denominator."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine end at `min_lr_ratio`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    warmup_proportion: float | None = Field(None, ge=0.0, le=1.0)
    """The same as a share of the run's steps, rounded down; None takes `warmup_steps`."""
    min_lr_ratio: float = Field(0.0, ge=0.0, le=1.0)
    """Last learning rate as a share of the peak."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Clip the global gradient norm to this."""
    initial_loss_scale: float = Field(2.0**32, gt=0.0)
    """Factor on the loss of passes in float16, taken off the gradients again. A step whose gradients
    overflow is skipped (`skipped_steps`), so that the first steps of a run find the right scale."""
    min_loss_scale: float = Field(1.0, gt=0.0)
    """The scale is never below this."""
    loss_scale_window: int = Field(5, ge=1)
    """Steps in a row without overflow after which the scale doubles."""
    hysteresis: int = Field(2, ge=1)
    """Overflows from which on each one halves the scale, counted since the scale last doubled."""

    def warmup_of(self, total_steps: int) -> int:
        """Return the steps of linear warm-up in a run of `total_steps`."""
        if self.warmup_proportion is None:
            return self.warmup_steps
        return int(self.warmup_proportion * total_steps)

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if self.warmup_proportion is not None and self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_proportion={self.warmup_proportion} both "
                "say how long the warm-up is; leave one out"
            )
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                f"min_loss_scale={self.min_loss_scale} exceeds "
                f"initial_loss_scale={self.initial_loss_scale}"
            )
        return self


EMPTY = OptimizerConfig(type="empty")
"""The optimizer of a model that is never trained."""
