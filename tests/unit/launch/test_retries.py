"""A trainer that failed: started again or not, as `recovery` says. It is a program of a line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.contracts.config.launch import LaunchConfig
from headway.launch.launchers import run as launched
from headway.launch.launchers.local import LocalRun
from headway.runtime.config import validate_config
from headway.runtime.gpus import GpuSurvey
from tests.waiting import eventually

FAILS_FOR_GOOD = "import sys; sys.exit(7)"
BAD_INPUT = "import sys; sys.exit(2)"
FAILS_ONCE = """
import pathlib, sys
mark = pathlib.Path({mark!r})
failed_before = mark.exists()
mark.touch()
sys.exit(0 if failed_before else 1)
"""


@pytest.fixture
def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LocalRun]]:
    """Runs without services, whose trainer is the given program."""
    runs: list[LocalRun] = []

    def make(program: str, **recovery: object) -> LocalRun:
        tree = {
            "model": "m",
            "gateway": {},
            "server": {"backend": {"type": "fake"}},
            "trainer": {
                "run_dir": str(tmp_path),
                "data": {"path": "d"},
                "rollout": {"reward": {"name": "exact"}},
                "weight_sync": {"type": "disk", "root": "w"},
                "recovery": {"retry_after_s": 0.0, **recovery},
            },
        }
        code = program.format(mark=str(tmp_path / "mark"))
        monkeypatch.setattr(launched, "_module", lambda *_: [sys.executable, "-c", code])
        run = LocalRun(validate_config(LaunchConfig, tree), survey=GpuSurvey(()))
        runs.append(run)
        run.start_trainer()
        return run

    yield make
    for run in runs:
        run.stop()


def end_of(run: LocalRun) -> int | None:
    eventually(lambda: run.watch() is not None, 60, "the trainer has ended for good")
    return run.watch()


def config_of(tmp_path: Path) -> str:
    return (tmp_path / "configs" / "trainer.yaml").read_text()


@pytest.mark.parametrize("mode", ["disabled", "resume"])
def test_a_trainer_is_not_started_again_unless_that_is_asked_for(run_of, tmp_path, mode):
    assert end_of(run_of(FAILS_FOR_GOOD, mode=mode)) == 7
    assert f"mode: {mode}" in config_of(tmp_path)


@pytest.mark.parametrize("mode", ["auto", "fault"])
def test_a_trainer_that_failed_goes_on_from_its_checkpoint(run_of, tmp_path, mode):
    run = run_of(FAILS_ONCE, mode=mode)
    assert f"mode: {mode}" in config_of(tmp_path)  # the first start
    assert end_of(run) == 0
    assert "mode: auto" in config_of(tmp_path)


def test_a_trainer_is_started_again_so_many_times(run_of, monkeypatch):
    run = run_of(FAILS_FOR_GOOD, mode="auto", retries=2)
    starts = []
    again = run.start_trainer
    monkeypatch.setattr(
        run, "start_trainer", lambda resumes: (starts.append(resumes), again(resumes))
    )
    assert end_of(run) == 7
    assert starts == [True, True]


def test_it_waits_before_it_is_started_again(run_of, tmp_path, monkeypatch):
    run = run_of(FAILS_ONCE, mode="auto", retry_after_s=100.0)
    now = [0.0]
    monkeypatch.setattr(launched.time, "monotonic", lambda: now[0])
    run.process("trainer").wait(60)
    assert run.watch() is None
    now[0] = 99.0
    assert run.watch() is None
    assert run.process("trainer").exit_code() == 1
    now[0] = 101.0
    assert run.watch() is None
    assert run.process("trainer").wait(60) == 0


def test_input_that_its_user_has_to_mend_fails_once(run_of):
    assert end_of(run_of(BAD_INPUT, mode="auto", retries=5)) == 2
