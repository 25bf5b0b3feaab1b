"""Result of a program, from what its worker saw and from what the program reported of itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast, get_args

from gateway.components.shared_services import Program, ProgramResult, ProgramStatus

STOPPED: dict[str, ProgramStatus] = {
    "cpu": "timeout",
    "wall": "timeout",
    "output": "output_limit",
    "memory": "memory",
}


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """A program's report of itself."""

    results: tuple[Any, ...] = ()
    ended: ProgramStatus | None = None
    """Status at the end; None for a program that was ended, or left by `os._exit`."""


def read_report(text: str) -> ProgramReport:
    """Read lines of JSON that may be torn or forged; every other line is an error."""
    results: list[Any] = []
    ended: ProgramStatus | None = None
    for line in text.splitlines():
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = {"result": {"error": "a result that cannot be read"}}
        match message:
            case {"result": dict(result)} if "value" in result or "error" in result:
                results.append(result)
            case {"ended": str(status)} if status in get_args(ProgramStatus):
                ended = cast("ProgramStatus", status)
    return ProgramReport(tuple(results), ended)


def classify_ending(program: Program, frame: dict[str, Any]) -> ProgramResult:
    """The outcome of a program from its worker's frame.

    Raises:
        KeyError, TypeError, ValueError: the frame is none of ours.
    """
    report = read_report(frame["report"])
    cpu_s = float(frame["cpu_s"])
    status = _status(program, frame["stopped"], frame["exit"], cpu_s, report)
    return ProgramResult(
        status=status,
        stdout=str(frame["stdout"]),
        stderr=str(frame["stderr"]),
        results=report.results[: len(program.calls)],
        cpu_s=cpu_s,
        wall_s=float(frame["wall_s"]),
        max_rss_bytes=int(frame["max_rss_bytes"]),
    )


def _status(
    program: Program, stopped: str | None, exit_code: int, cpu_s: float, report: ProgramReport
) -> ProgramStatus:
    if stopped is not None:
        return STOPPED[stopped]
    if cpu_s > program.cpu_s:
        return "timeout"
    if report.ended is not None:
        return report.ended
    return "ok" if exit_code == 0 else "runtime_error"
