"""A real run through its life: its steps, kill -9 of its parts, a trainer that goes on, its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.contracts.config.launch import LaunchConfig
from headway.launch.launchers.local import LocalRun
from headway.runtime.journal import METRICS_NAME, read_steps
from tests.processes import local_run
from tests.waiting import eventually

START_S = 90.0
END_S = 150.0


def steps_of(config: LaunchConfig) -> list[dict[str, float]]:
    """What the trainer has written of each step that is done."""
    return read_steps(Path(config.trainer.run_dir) / METRICS_NAME)


def until_steps(config: LaunchConfig, count: int) -> None:
    """Wait until that many are done."""
    eventually(lambda: len(steps_of(config)) >= count, START_S, f"{count} steps are done")


def until_checkpoint(config: LaunchConfig) -> None:
    """Wait until there is one: it is written while the next step is trained."""
    folder = Path(config.trainer.run_dir) / "checkpoints"
    eventually(lambda: any(folder.glob("step-*")), START_S, "there is a checkpoint")


def kill(run: LocalRun, name: str) -> None:
    """Kill a process of a run with -9; returns once it is gone."""
    process = run.process(name)
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: process.exit_code() is not None, 10, f"{name} is dead")


def finish(run: LocalRun) -> None:
    """Supervise a run until its trainer ends well."""
    eventually(lambda: run.watch() is not None, END_S, "the trainer has ended")
    assert run.watch() == 0, run.process("trainer").log_tail()


@contextmanager
def resumed(run: LocalRun, config: LaunchConfig) -> Iterator[None]:
    """A new trainer with the services of `run`; it goes on where a dead one was, and ends well."""
    recovery = config.trainer.recovery.model_copy(update={"mode": "auto", "retries": 0})
    trainer = config.trainer.model_copy(update={"recovery": recovery})
    again = local_run(config.model_copy(update={"trainer": trainer}))
    again.url = run.url
    try:
        again.start_trainer()
        yield
        finish(again)
    finally:
        again.stop()


def resume(run: LocalRun, config: LaunchConfig) -> None:
    """`resumed`, with nothing to do meanwhile."""
    with resumed(run, config):
        pass
