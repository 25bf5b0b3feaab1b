"""The critic: a model of what the policy will still earn, and how it learns."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headway.contracts.config.base import Config
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig


class ValueModelConfig(TrainedModelConfig):
    head: Literal["lm", "value"] = "value"
    """A critic has a scalar head: stored as a sequence classification model with one label, or random on
    the body of a language model."""

    @model_validator(mode="after")
    def _check_head(self) -> ValueModelConfig:
        if self.head != "value":
            raise ValueError(f"head={self.head} says nothing of values; set head=value")
        return self


class CriticConfig(Config):
    model: ValueModelConfig | None = None
    """The model to start from; None takes the policy's, with a scalar head in place of its own."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW of the critic, and its schedule."""
    eps_clip: float | None = Field(0.5, gt=0.0)
    """Values may move this far from those before the step, normalised; the larger loss of moved and plain
    counts (arXiv:2005.12729). None does not clip."""
    huber_delta: float | None = Field(None, gt=0.0)
    """Beyond this error the loss is linear; None is half the square everywhere."""
    normalization: Literal["none", "exponential", "cumulative"] = "none"
    """The critic speaks in units of the returns' running mean and spread: an exponential average, or the
    mean of all so far (PopArt's statistics, arXiv:1602.07714)."""
    decay: float = Field(0.99995, gt=0.0, lt=1.0)
    """Of the exponential average, per version."""
    warmup_steps: int = Field(0, ge=0)
    """First versions in which the critic alone learns, and the policy stays as it is."""

    @model_validator(mode="after")
    def _check(self) -> CriticConfig:
        default = type(self).model_fields["decay"].default
        if self.normalization != "exponential" and self.decay != default:
            raise ValueError(
                f"decay={self.decay} belongs to normalization=exponential, not {self.normalization}"
            )
        return self
