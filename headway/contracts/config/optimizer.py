"""AdamW and its schedule."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.contracts.config.base import Config


class OptimizerConfig(Config):
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
    min_lr_ratio: float = Field(0.0, ge=0.0, le=1.0)
    """Last learning rate as a share of the peak."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Clip the global gradient norm to this."""
