"""What it cost to hand the trainer's parameters over to generation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferCost:
    """The last transfer of weights on one rank."""

    seconds: float
    model_bytes: int
    """Parameters of the whole model, as they are trained."""
    copied_bytes: int
    """Memory that generation holds besides the trainer's; 0 if it uses that in place."""

    def metrics(self) -> dict[str, float]:
        """Return it as metrics of a step."""
        return {
            "weight_transfer_s": self.seconds,
            "weight_transfer_model_bytes": float(self.model_bytes),
            "weight_transfer_copied_bytes": float(self.copied_bytes),
        }
