"""A run that failed tells which process did, why, once, and how to go on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.errors import ConfigError, QueueFull, ServiceError
from headway.launch.failure import Reason, RunLogs, explain_failure, reason_of
from headway.launch.run import main
from headway.runtime.command import CommandFailed
from headway.runtime.config import load_config
from headway.runtime.process import Process, ProcessSpec

CRASH = ["Traceback (most recent call last):", '  File "x.py", line 1', "KeyError: 'weights'"]
TORCHRUN = [
    "E0610 12:00:00 failed (exitcode: 2)",
    "Traceback (most recent call last):",
    '  File "run.py", line 1',
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "=====================",
]
LOGGED = '{"time": "now", "message": "loaded"}'


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], None),
        ([LOGGED], None),
        ([LOGGED, "error: data.path: x", "y: z"], Reason("data.path: x\ny: z", is_bad_input=True)),
        (["error [sync_failed]: torn", LOGGED], Reason("torn")),
        (["error: old", LOGGED, "error: new"], Reason("new", is_bad_input=True)),
        (CRASH, Reason("KeyError: 'weights' (a crash: the traceback is in the log)")),
        (["error: rows", *TORCHRUN], Reason("rows", is_bad_input=True)),
        (
            [*(f"[rank1]: {line}" for line in CRASH), *TORCHRUN],
            Reason("KeyError: 'weights' (a crash: the traceback is in the log)"),
        ),
    ],
)
def test_the_last_words_of_a_process_are_its_reason(lines, reason):
    assert reason_of(lines) == reason


class FakeRun:
    """Processes that ended."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}

    def process(self, name: str) -> Process:
        return self.processes[name]


@pytest.fixture
def config(tmp_path: Path) -> LaunchConfig:
    flags = {
        "model": tmp_path / "model",
        "trainer.data.path": tmp_path / "rows.jsonl",
        "trainer.rollout.reward.name": "exact",
        "trainer.weight-sync.root": tmp_path / "weights",
        "trainer.run-dir": tmp_path / "run",
    }
    argv = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return load_config(LaunchConfig, argv)


def ended(folder: Path, program: str) -> Process:
    """A process with a log, after its end."""
    spec = ProcessSpec(
        "trainer", [sys.executable, "-S", "-c", program], folder / "run/logs/trainer.log"
    )
    process = Process(spec)
    assert process.wait(30) is not None
    return process


def failed(config: LaunchConfig, folder: Path, program: str) -> CommandFailed:
    """What a run is told to have failed of when its trainer runs a program."""
    run = FakeRun()
    with pytest.raises(CommandFailed) as caught, explain_failure(run, config, "--go-on"):
        run.processes["trainer"] = ended(folder, program)
        raise ServiceError("the trainer ended")
    return caught.value


BAD_INPUT = "import sys; sys.exit('error: rows.jsonl line 1 is not JSON')"


def test_bad_input_of_a_process_is_told_once_with_status_2(config, tmp_path):
    log = tmp_path / "run" / "logs" / "trainer.log"
    log.parent.mkdir(parents=True)
    log.write_text("error: of the run before\n")
    error = failed(config, tmp_path, BAD_INPUT)
    assert error.status == 2
    assert str(error) == f"trainer: rows.jsonl line 1 is not JSON\nits log: {log}"


def test_resuming_is_advised_only_where_there_is_a_checkpoint(config, tmp_path):
    (tmp_path / "run" / "checkpoints" / "step-00000020").mkdir(parents=True)
    error = failed(config, tmp_path, "1 / 0")
    assert error.status == 1
    first, _, advice = str(error).splitlines()
    assert first.startswith("trainer: ZeroDivisionError: division by zero (a crash")
    assert advice == "go on from the newest checkpoint with --go-on"
    said = failed(config, tmp_path, "import sys; sys.exit('error: set recovery.mode=resume')")
    assert "--go-on" not in str(said)


def test_a_process_that_said_nothing_shows_the_end_of_its_log(config, tmp_path):
    program = "import os; print('working', flush=True); os.kill(os.getpid(), 9)"
    error = failed(config, tmp_path, program)
    assert error.status == 1
    first, last = str(error).splitlines()
    assert first.startswith("trainer was ended by SIGKILL; its log, ")
    assert last == "  working"


def test_what_no_process_failed_of_is_told_as_it_is(config):
    with (
        pytest.raises(CommandFailed, match=r"^server-0 was not ready$"),
        explain_failure(FakeRun(), config, ""),
    ):
        raise ServiceError("server-0 was not ready")
    for error in (ConfigError("x"), QueueFull("y")):
        with pytest.raises(type(error)), explain_failure(FakeRun(), config, ""):
            raise error


def test_a_log_that_is_not_there_has_no_lines(tmp_path):
    assert RunLogs(tmp_path).lines("trainer") == []


def test_a_run_names_the_process_that_could_not_start(tmp_path):
    flags = ["--model", "/nowhere", "--trainer.run-dir", str(tmp_path), "--gateway.service.port=0"]
    flags += ["--trainer.data.path", "rows", "--trainer.rollout.reward.name", "exact"]
    with pytest.raises(CommandFailed) as caught:
        main([*flags, "--trainer.weight-sync.root", str(tmp_path / "weights")])
    assert caught.value.status == 2
    first, second = str(caught.value).splitlines()
    assert first.startswith("gateway: /nowhere/tokenizer.json does not exist, or user ")
    assert second == f"its log: {tmp_path / 'logs' / 'gateway.log'}"
