"""How a policy learns from pairs without a reward model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headway.contracts.config.base import Config


class PreferenceConfig(Config):
    """Direct preference optimisation."""

    loss: Literal["dpo", "ipo"] = "dpo"
    """`dpo` (arXiv:2305.18290): log-sigmoid of the margin. `ipo` (arXiv:2310.12036): squared distance of
    the margin from 1 / (2 · beta), so that it does not grow without end."""
    beta: float = Field(0.1, gt=0.0)
    """Strength of the tie to the reference: the smaller, the further the policy may go."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """Share of labels held to be wrong (`dpo` only)."""
    sft_coef: float = Field(0.0, ge=0.0)
    """Weight of a supervised term, the chosen answer's mean negative log-likelihood (RPO,
    arXiv:2404.19733): it keeps the chosen answer from growing less likely."""

    @model_validator(mode="after")
    def _check_smoothing(self) -> PreferenceConfig:
        if self.loss == "ipo" and self.label_smoothing > 0:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} is without effect beside loss=ipo; set it to 0"
            )
        return self
