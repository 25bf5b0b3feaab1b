"""Checkpoints: what is kept so that a run can go on after a crash, and who lets it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.contracts.config.frequency import FrequencyConfig


class RecoveryConfig(FrequencyConfig):
    mode: Literal["disabled", "resume", "auto", "fault"] = "disabled"
    """`disabled` starts from scratch, and refuses a run folder with checkpoints. `resume` goes on from
    the newest checkpoint, and refuses a run folder without one. `auto` goes on if there is one. `fault`
    starts from scratch. With `auto` and `fault` a launcher starts a trainer that failed again, from its
    newest checkpoint."""
    retries: int = Field(1, ge=0)
    """Times that a launcher starts the trainer again after it failed, except for input that its user has
    to mend; of `auto` and `fault`."""
    retry_after_s: float = Field(10.0, ge=0.0)
    """Seconds between a failure and the new start."""
    every_steps: int | None = Field(10, ge=1)
    """Steps between checkpoints; None does not count steps. The last step has one in any case."""
    keep: int = Field(2, ge=1)
    """Checkpoints to keep."""
    asynchronous: bool = True
    """Train on while a checkpoint is written: the loop stops only until the state is copied, which takes
    as much memory of the host again as a rank's parameters and optimizer. A checkpoint waits for the one
    before."""

    @property
    def resumes(self) -> bool:
        """True if a trainer goes on from a checkpoint that is there."""
        return self.mode in ("resume", "auto")

    @property
    def max_retries(self) -> int:
        """Times that a launcher starts a failed trainer again."""
        return self.retries if self.mode in ("auto", "fault") else 0
