"""Runs steps, each killable, and keeps the report of those that are done."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from day.page import render
from day.steps import Step
from headway.runtime.process import Process, ProcessSpec

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
MAX_LOG_BYTES = 1 << 26
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a step."""

    name: str
    question: str
    command: str
    env: Mapping[str, str]
    status: Literal["ok", "failed", "timeout", "skipped"]
    seconds: float = 0.0
    returncode: int | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Metrics in its output (`measure.report`)."""
    said: str = ""
    """End of its output, or the reason for skipping it."""


class Day:
    """Report to which each step is added when it ends."""

    def __init__(
        self, out: Path, gpus: str, mode: str, env: Mapping[str, str] | None = None
    ) -> None:
        """Args:
        out: folder of report and logs.
        gpus: what the driver says.
        env: added to the environment of every step.
        """
        self.out = out
        self._env = env or {}
        self._results: dict[int, Result] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._head = {
            "mode": mode,
            "gpus": gpus,
            "host": platform.node(),
            "machine": f"{os.cpu_count()} CPUs, {platform.platform()}",
            "python": platform.python_version(),
            "commit": _commit(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._began = time.monotonic()
        (self.out / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def exit_status(self) -> int:
        """1 if a step failed, or did not end in time."""
        return int(any(result.status in ("failed", "timeout") for result in self._results.values()))

    def run_all(self, steps: Sequence[Step], at_once: int) -> None:
        """Run steps in their order, a number of them side by side."""
        if at_once == 1:  # in this thread, which an interrupt ends
            list(map(self.run, steps))
            return
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(self.run, steps))

    def run(self, step: Step) -> Result:
        """Run a step, or note why not; write the report."""
        number = next(self._numbers)
        print(f"{step.name}: {step.question}", flush=True)
        result = self._skip(step) if step.skip else self._start(step, number)
        print(f"    {step.name} {result.status} after {result.seconds:.0f} s", flush=True)
        with self._lock:
            self._results[number] = result
            self._write()
        return result

    def _start(self, step: Step, number: int) -> Result:
        log = self.out / "logs" / f"{number:02}-{step.name}.log"
        log.unlink(missing_ok=True)
        before = time.monotonic()
        try:
            process = Process(ProcessSpec(step.name, step.argv, log, {**self._env, **step.env}))
        except OSError as error:
            return self._result(step, "failed", said=f"cannot be started: {error}")
        try:
            code = process.wait(step.timeout_s)
        finally:
            process.stop(GRACE_S)  # with all that it started
        text = _read(log)
        status: Literal["ok", "failed", "timeout"] = "ok" if code == 0 else "failed"
        return self._result(
            step,
            "timeout" if code is None else status,
            seconds=round(time.monotonic() - before, 2),
            returncode=code,
            metrics=_figures(text),
            said="\n".join(text.splitlines()[-step.tail_lines :]),
        )

    def _skip(self, step: Step) -> Result:
        return self._result(step, "skipped", said=step.skip)

    def _result(self, step: Step, status: Any, **more: Any) -> Result:
        return Result(step.name, step.question, " ".join(step.argv), step.env, status, **more)

    def _write(self) -> None:
        seconds = round(time.monotonic() - self._began, 1)
        results = [asdict(result) for _, result in sorted(self._results.items())]
        report = {**self._head, "seconds": seconds, "steps": results}
        _replace(self.out / "report.json", json.dumps(report, indent=1))
        _replace(self.out / "report.md", render(report))


def _figures(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        if line.startswith('{"name"'):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def _read(log: Path) -> str:
    with log.open("rb") as file:
        return file.read(MAX_LOG_BYTES).decode(errors="replace")


def _replace(path: Path, text: str) -> None:
    """Replace a file at once, so that readers never see half of it."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return found.stdout.strip() or "unknown"
