"""What is kept so that a run can go on after a crash."""

from __future__ import annotations

from pydantic import Field

from headway.contracts.config.base import Config


class RecoveryConfig(Config):
    every_steps: int = Field(10, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(2, ge=1)
    """Checkpoints to keep."""
    asynchronous: bool = True
    """Train on while a checkpoint is written: the loop stops only until the state is copied, which takes
    as much memory of the host again as a rank's parameters and optimizer. A checkpoint waits for the one
    before."""
    resume: bool = False
    """Go on from the newest checkpoint of the run folder, if there is one."""
