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
    """Error beyond which the loss is linear; None is half the square everywhere."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"] = (
        "token_mean"
    )
    """Tokens -> loss: the mean over all tokens, or the mean over sequences of their mean or their sum."""
    normalization: Literal["none", "exponential", "cumulative"] = "none"
    """The critic speaks in units of the returns' running mean and spread: an exponential average, or the
    mean of all so far (PopArt's statistics, arXiv:1602.07714)."""
    decay: float = Field(0.99995, gt=0.0, lt=1.0)
    """Decay of the exponential average, per version."""
    normalization_eps: float = Field(0.0, ge=0.0, lt=1.0)
    """The average is divided by the weight of what it has seen, but by no less than this; of
    `exponential`. Above 0 it leans to 0 at first where `decay` is nearer to 1 than this."""
    initial_std: float = Field(1.0, gt=0.0)
    """Spread before the first returns are known: what the critic says is multiplied by it at first."""
    num_epochs: int = Field(1, ge=1)
    """Times that the critic learns from each batch, with the same targets."""
    warmup_steps: int = Field(0, ge=0)
    """First versions in which the critic alone learns, and the policy stays as it is."""

    @model_validator(mode="after")
    def _check(self) -> CriticConfig:
        if self.normalization != "exponential":
            self._refuse(("decay", "normalization_eps"), "exponential")
        if self.normalization == "none":
            self._refuse(("initial_std",), "exponential or cumulative")
        if self.optimizer.type == "empty":
            raise ValueError(
                "a critic is trained, and optimizer.type=empty trains nothing; set adam"
            )
        return self

    def _refuse(self, names: tuple[str, ...], kinds: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}={value} belongs to normalization={kinds}, not {self.normalization}"
                )
