"""How often something is done during a run."""

from __future__ import annotations

from pydantic import Field

from headway.contracts.config.base import Config


class FrequencyConfig(Config):
    """By steps, by epochs and by seconds: it is done whenever one of them says so."""

    every_steps: int | None = Field(None, ge=1)
    """Steps between two times; None does not count steps."""
    every_epochs: int | None = Field(None, ge=1)
    """Passes over the data between two times; None does not count them."""
    every_s: float | None = Field(None, gt=0.0)
    """Seconds between two times, looked at after each step and counted from the start of the process;
    None does not look at the clock."""


class ExportConfig(FrequencyConfig):
    """Trained models as Hugging Face directories in `exports/step-…` of the run folder, besides those
    at the end of a run."""

    keep: int | None = Field(None, ge=1)
    """Newest exports to keep; None keeps all."""
