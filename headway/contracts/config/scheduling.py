"""Resources that a process asks of the scheduler that starts it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from headway.contracts.config.base import Config

Word = Annotated[str, StringConstraints(pattern=r"^[^\s#'\"]+$", max_length=4096)]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\n\r\x00]*$")]
TimeLimit = Annotated[
    str, StringConstraints(pattern=r"^(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2}|UNLIMITED)$")
]


class JobConfig(Config):
    """Resources of a process; None leaves it to the scheduler."""

    cpu: int | None = Field(None, ge=1)
    """Cores; None takes as many as the process has threads by its own settings, or 1."""
    gpu: int | None = Field(None, ge=0)
    """Devices; None takes as many as the process needs by its own settings."""
    mem: int = Field(8192, ge=1)
    """Memory of the host, in MiB; Ray is asked for any only if it is not the default."""
    nodelist: Word | None = None
    """Machines to run on, as the scheduler writes a list of them (Slurm: `gpu[01-04]`)."""
    exclude: Word | None = None
    """Machines not to run on."""
    partition: Word | None = None
    """Queue to wait in."""
    container_image: Word | None = None
    """Image to run in (Slurm: by the plugin pyxis)."""
    env_vars: dict[Variable, Line] = {}
    """Environment variables to add. They are written into scripts: secrets do not belong here."""
    time_limit: TimeLimit | None = None
    """Longest time to run: minutes, `hours:minutes:seconds` or `days-hours:minutes:seconds`; in quotes,
    since YAML reads `12:00:00` as a number."""
    begin: Word | None = None
    """Earliest start (Slurm: `16:00`, `now+1hour`, `2030-01-20T12:34:00`)."""
    deadline: Word | None = None
    """Latest end: a job that cannot make it is not started."""


class SchedulingConfig(JobConfig):
    """Resources of one rank of a trainer, unless stated otherwise; None leaves it to the scheduler."""

    nodes: int = Field(1, ge=1)
    """Machines."""
    ranks_per_node: int = Field(1, ge=1)
    """Trainer ranks on each machine."""
    gpu: int | None = Field(None, ge=0, le=1)
    """Devices: a rank trains on one, or on the CPU. None is what the rank that is asked has; then
    `headway slurm` asks for one if `trainer.device` is cuda, and else for none."""


class RunSchedulingConfig(Config):
    """Resources of the processes beside the trainer, whose own are in `trainer.trainer.scheduling`."""

    gateway: JobConfig = JobConfig()
    server: JobConfig = JobConfig()
    """Resources of each generation server."""
