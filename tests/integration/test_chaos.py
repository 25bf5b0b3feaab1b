"""The short form of `benchmarks/chaos.py`: two gateways, servers, Redis and a trainer under faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.gateway.ledger_suite import RedisServer

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 400.0
CALM_S = 4.0
"""Without faults, before and after: the ratio of goodput wants more, and nothing here is said of it."""
TAIL_LINES = 12
PROMISES = (
    "lost",
    "duplicated",
    "unaccounted",
    "disagreeing",
    "trained_twice",
    "over_stale",
    "stuck",
)

pytestmark = pytest.mark.extended


@pytest.mark.timeout(LIMIT_S + 20.0)
def test_nothing_is_lost_doubled_late_or_stuck_while_processes_die(tmp_path: Path) -> None:
    if not RedisServer.is_installed():
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "chaos.py"), "--minutes", "0.8"]
    command += ["--seed", "3", "--every-s", "3", "--calm-s", str(CALM_S), "--dir", str(tmp_path)]
    code, told, reasons = run_in_group(command)
    assert told, f"{reasons}\n{log_tails(tmp_path)}"
    found = json.loads(told)
    sys.stdout.write(f"goodput under faults / without: {found['value']}; {found['faults']}\n")
    broken = {name: found[name] for name in PROMISES if found[name]}
    assert not broken, f"{found}\n{log_tails(tmp_path)}"
    assert code == 0, reasons
    assert sum(found["faults"].values()) >= 3
    assert found["counts"]["consumed"] > 0


def run_in_group(command: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; whatever happens, no process is left behind."""
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told, reasons = process.communicate(timeout=LIMIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, told, reasons


def log_tails(folder: Path) -> str:
    """The last lines of every process."""
    tails = []
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        tails.append("\n".join([f"== {log.name}", *lines[-TAIL_LINES:]]))
    return "\n".join(tails)
