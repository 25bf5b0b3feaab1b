"""Learning from pairs without a reward model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headway.contracts.config.base import Config


class PreferenceConfig(Config):
    """Direct preference optimisation."""

    loss: Literal["dpo", "ipo", "hinge", "exo_pair"] = "dpo"
    """`dpo` (arXiv:2305.18290): log-sigmoid of the margin. `ipo` (arXiv:2310.12036): squared distance of
    the margin from 1 / (2 · beta), so that it does not grow without end. `hinge` (SLiC,
    arXiv:2305.10425; RSO, arXiv:2309.06657): what beta · margin lacks to 1. `exo_pair`
    (arXiv:2402.00856): the reverse KL to the smoothed labels."""
    beta: float = Field(0.1, gt=0.0)
    """Strength of the tie to the reference: the smaller, the further the policy may go."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """Share of labels held to be wrong; of `dpo`, and of `exo_pair`, which needs it."""
    sft_coef: float = Field(0.0, ge=0.0)
    """Weight of a supervised term, the chosen answer's mean negative log-likelihood (RPO,
    arXiv:2404.19733): it keeps the chosen answer from growing less likely."""

    @model_validator(mode="after")
    def _check_smoothing(self) -> PreferenceConfig:
        smoothing = self.label_smoothing
        if self.loss in ("ipo", "hinge") and smoothing > 0:
            raise ValueError(
                f"label_smoothing={smoothing} is without effect beside loss={self.loss}; set it to 0"
            )
        if self.loss == "exo_pair" and smoothing == 0:
            raise ValueError(
                "loss=exo_pair is infinite for label_smoothing=0; set it above, for example to 0.001"
            )
        return self
