"""The model that the policy is kept near."""

from __future__ import annotations

from pydantic import Field, model_validator

from headway.contracts.config.base import Config


class ReferenceConfig(Config):
    """Loaded where `algorithm.kl_coef` is above 0."""

    path: str | None = Field(None, min_length=1)
    """Directory of the model; None takes the one that the run starts from. With `model.lora` that is the
    trained model without its adapters, and no second copy is held."""
    ema_eta: float | None = Field(None, gt=0.0, le=1.0)
    """The reference follows the policy: after each version it is eta · policy + (1 - eta) · reference;
    None leaves it as it is."""

    @model_validator(mode="after")
    def _check(self) -> ReferenceConfig:
        if self.path is not None and self.ema_eta is not None:
            raise ValueError(
                f"ema_eta={self.ema_eta} follows the policy from the model that the run starts from; "
                f"leave out path={self.path}"
            )
        return self
