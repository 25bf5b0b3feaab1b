"""The trainer of examples/own_trainer, stopped with and without warning, goes on where it was."""

from __future__ import annotations

import runpy
import signal
from collections.abc import Callable
from contextlib import redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import pytest
import torch

from headway.contracts.config.launch import LaunchConfig
from headway.launch.launchers.local import LocalRun
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.processes import FORKS
from tests.waiting import eventually

SCRIPT = Path(__file__).parents[2] / "examples" / "own_trainer" / "train.py"
LIMIT_S = 90.0
BATCH = 64
FOREVER = 1000


class Output:
    """The output of a script that gets Ctrl-C at one of its lines."""

    def __init__(self, file: TextIO, interrupted_at: int) -> None:
        self._file = file
        self._left = interrupted_at

    def write(self, text: str) -> int:
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)


def train(url: str, model_dir: Path, run_dir: Path, steps: int, interrupted_at: int) -> None:
    """What the script does, in a process that has imported torch."""
    torch.set_num_threads(1)
    script = runpy.run_path(str(SCRIPT))
    with (run_dir / "output").open("a") as file, redirect_stdout(Output(file, interrupted_at)):
        script["train"](RemoteInferenceEngine(url), str(model_dir), run_dir, steps)


def steps_of(run_dir: Path) -> list[int]:
    """The steps that were done, in their order."""
    return [int(line.split()[1]) for line in (run_dir / "output").read_text().splitlines()]


@pytest.mark.extended
@pytest.mark.timeout(4 * LIMIT_S)
def test_a_trainer_that_was_stopped_goes_on_with_a_new_version(
    make_config: Callable[..., LaunchConfig],
    start: Callable[[LaunchConfig], LocalRun],
    connect: Callable[[str], RemoteInferenceEngine],
    tmp_path: Path,
    model_dir: Path,
):
    url = start(make_config()).url
    gateway = connect(url)

    def begin(steps: int, interrupted_at: int = FOREVER) -> BaseProcess:
        args = (url, model_dir, tmp_path, steps, interrupted_at)
        process = FORKS.Process(target=train, args=args, daemon=True)
        (tmp_path / "output").touch()
        process.start()
        return process

    def until(count: int) -> None:
        eventually(lambda: len(steps_of(tmp_path)) >= count, LIMIT_S, f"{count} steps are done")

    killed = begin(FOREVER)
    until(7)
    killed.kill()
    killed.join()
    first = steps_of(tmp_path)
    assert first == list(range(len(first)))
    seen = gateway.status().head

    stopped = begin(FOREVER, interrupted_at=7)
    stopped.join(LIMIT_S)
    assert stopped.exitcode is not None
    second = steps_of(tmp_path)[len(first) :]
    assert second[0] == len(first) - len(first) % 5  # the step after its checkpoint
    assert gateway.status().head > seen
    assert gateway.status().max_staleness is None  # it has detached
    assert gateway.status().counts.queued == 0

    last = begin(second[-1] + 3)
    last.join(LIMIT_S)
    assert last.exitcode == 0
    assert steps_of(tmp_path)[-1] == second[-1] + 2
    status, audit = gateway.status(), gateway.audit()
    assert status.version == status.head
    assert (audit.lost, audit.duplicated) == (0, 0)
    assert audit.counts.consumed == (second[-1] + 3) * BATCH
