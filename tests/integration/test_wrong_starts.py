"""What cannot start says why in one line, with status 2 for wrong input and 1 for the rest; what starts
can be ended at any moment."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headway.runtime.process import Process, ProcessSpec
from tests.processes import start_process

DEADLINE_S = 30.0
ENDS_S = 12.0
"""Generous: an end takes a second. An engine that serves would have 15."""
GATEWAY = "gateway --tokenizer {model} --ledger :memory: --service.port 0"
SERVE = "serve --model.path {model} --service.port 0"
TRAIN = (
    "train --model.path {model} --data.path {rows} --rollout.reward.name exact "
    "--weight-sync.root {used}/weights --run-dir {used}/run"
)
RUN = "run --model {model} --trainer.data.path {rows} --trainer.rollout.reward.name exact"

WRONG = [
    ("trian", 2, "no command 'trian'; did you mean 'train'?"),
    ("train --type grop", 2, "no experiment named 'grop'"),
    ("gateway --tokenizer /nowhere", 2, "/nowhere/tokenizer.json does not exist"),
    ("serve --model.path /nowhere", 2, "/nowhere is not a model directory"),
    (f"{GATEWAY} --executor.max-concurent 3", 2, "did you mean 'max_concurrent'?"),
    (f"{GATEWAY} --service.port {{port}}", 2, "port {port} on 127.0.0.1 is in use; stop the other"),
    (f"{GATEWAY} --service.host 0.0.0.0", 2, "service.host=0.0.0.0 is beyond loopback"),
    (f"{GATEWAY} --ledger {{held}}", 2, "another gateway has the ledger {held} open; name another"),
    (f"{GATEWAY} --ledger {{rows}}", 1, "ledger {rows} cannot be opened: file is not a database"),
    (f"{GATEWAY} --modules [nowhere.mod]", 2, "modules names 'nowhere.mod', which cannot be impor"),
    (
        f"{SERVE} --modules [nowhere.mod]",
        2,
        "modules names 'nowhere.mod', which cannot be imported",
    ),
    (f"{SERVE} --backend.type sglang", 2, "SGLang is not installed in {python}"),
    (f"{SERVE} --backend.type vllm", 2, "vLLM is not installed in {python}"),
    (
        f"{SERVE} --backend.type sglang --backend.python /nowhere/python",
        2,
        "cannot start /nowhere/python: No such file or directory; set backend.python",
    ),
    (
        f"{SERVE} --backend.type sglang --backend.max-sequences 4",
        2,
        "unknown key backend.max_sequences; it belongs to embedded_torch, not to sglang",
    ),
    (
        f"{RUN} --server.backend.type sglang --server.backend.max-sequences 4",
        2,
        "unknown key server.backend.max_sequences; it belongs to embedded_torch, not to sglang",
    ),
    (f"{SERVE} --gateway 127.0.0.1:80", 2, "gateway: http://HOST:PORT is wanted or a list [...]"),
    (f"{TRAIN} --rollout.url 127.0.0.1:80", 2, "rollout.url: http://HOST:PORT is wanted or a list"),
    (f"{TRAIN} --data.path {{torn}}", 2, "{torn} line 2 is not JSON"),
    (
        f"{TRAIN} --trainer.modules [nowhere]",
        2,
        "modules names 'nowhere', which cannot be imported",
    ),
    (
        "run --model {model} --trainer.data.path r",
        2,
        "trainer.rollout: required, and not set; give",
    ),
    ("status 127.0.0.1:80", 2, "'127.0.0.1:80' is no URL; http://HOST:PORT is wanted"),
    ("quickstart --run-dir {used}", 2, "--resume"),
]
"""Command, status, and what the line says."""

Start = Callable[[str], Process]


@pytest.fixture
def places(tmp_path: Path, model_dir: Path) -> Iterator[dict[str, str]]:
    """What stands in braces."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1"}\n')
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"prompt": "1"}\n{"prompt": \n')
    (tmp_path / "ledger.sqlite").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {
            "model": str(model_dir),
            "rows": str(rows),
            "torn": str(torn),
            "held": str(tmp_path / "held.sqlite"),
            "used": str(tmp_path),
            "python": sys.executable,
            "port": str(taken.getsockname()[1]),
        }


@pytest.fixture
def start(tmp_path: Path, places: dict[str, str]) -> Iterator[Start]:
    """Start `headway` with these words."""
    started: list[Process] = []

    def start_command(words: str) -> Process:
        argv = [word.format(**places) for word in words.split()]
        log = tmp_path / f"{len(started)}.log"
        ready = tmp_path / "ready.json" if "{held}" in words and not started else None
        given = [] if ready is None else ["--service.ready-file", str(ready)]
        command = [sys.executable, "-m", "headway.launch.cli", *argv, *given]
        started.append(start_process(ProcessSpec(argv[0], command, log, ready_file=ready)))
        return started[-1]

    yield start_command
    for process in started:
        process.stop(0.0)


def log_of(process: Process) -> str:
    assert process.spec.log is not None
    return process.spec.log.read_text()


@pytest.mark.parametrize(("words", "status", "said"), WRONG, ids=[words for words, _, _ in WRONG])
def test_a_wrong_start_says_so_in_one_line(
    words: str, status: int, said: str, start: Start, places: dict[str, str]
):
    if "{held}" in words:
        start(words).wait_ready(DEADLINE_S)
    process = start(words)
    code = process.wait(DEADLINE_S)
    told = log_of(process)
    lines = [line for line in told.splitlines() if not line.startswith("{")]
    assert code == status, told
    assert lines[0].startswith("error"), told
    assert said.format(**places) in lines[0]
    assert "Traceback" not in told
    assert '"level": "error"' not in told
    assert not [line for line in lines[1:] if not line.startswith(("usage:", "`headway"))], told


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A service that takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        yield listener


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "words",
    [f"{SERVE} --backend.type sglang --backend.url {{url}}", f"{TRAIN} --rollout.url {{url}}"],
)
def test_what_waits_for_another_service_can_be_ended(
    words: str, number: signal.Signals, start: Start, silent: socket.socket, places: dict[str, str]
):
    places["url"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
    process = start(words)
    with silent.accept()[0] as peer:
        assert peer.recv(1), "it asks, and waits for the answer"
        process.signal(number)
        assert process.wait(ENDS_S) == 130, log_of(process)
    assert "Traceback" not in log_of(process)
    assert '"level": "error"' not in log_of(process)


def test_a_gateway_whose_ledger_is_locked_can_be_ended(start: Start, places: dict[str, str]):
    with closing(sqlite3.connect(places["held"])) as other:
        other.execute("BEGIN EXCLUSIVE")
        process = start(f"{GATEWAY} --ledger {{held}}")
        until_logged(process, "Started server process")
        process.signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 130, log_of(process)
    assert "Traceback" not in log_of(process)


def test_an_engine_that_heeds_no_signal_ends_with_the_server_that_starts_it(
    tmp_path: Path, start: Start, places: dict[str, str]
):
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\ntrap '' TERM\nsleep 1000 &\necho deaf\nwait\n")
    engine.chmod(0o755)
    process = start(f"{SERVE} --backend.type sglang --backend.python {engine}")
    told = until_logged(process, "deaf")
    (begun,) = [json.loads(line) for line in told.splitlines() if "engine started" in line]
    process.signal(signal.SIGTERM)
    assert process.wait(ENDS_S) == 130
    assert not Path(f"/proc/{begun['pid']}").exists()


def until_logged(process: Process, text: str) -> str:
    """Wait for a text in a log."""
    deadline = time.monotonic() + DEADLINE_S
    while text not in log_of(process):
        assert process.exit_code() is None, log_of(process)
        assert time.monotonic() < deadline, log_of(process)
        time.sleep(0.02)
    return log_of(process)
