"""Why a run ended: the process that failed, its own words once, its log, and whether to go on.

A process says why it ends in its last words on standard error, `error: …` for what its user can mend and
`error [code]: …` for a failure (`headway.runtime.command`); one that crashed leaves a traceback.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.errors import ConfigError, DataError, ServiceError
from headway.launch.launchers.run import Run
from headway.runtime.command import EXIT_FAILURE, EXIT_USAGE, CommandFailed

LAST_BYTES = 1 << 16
LAST_LINES = 15
SAID = re.compile(r"^error(?P<code> \[\w+\])?: ")
RANK = re.compile(r"^\[rank\d+\]:\s?")
FOREIGN = re.compile(r"^(\{|\d\d:\d\d:\d\d |Traceback |[EWI]\d{4} |=====|-----)")
"""Log lines, tracebacks, and what torchrun adds: the words of a process end there."""
TRACEBACK = "Traceback (most recent call last)"
OF_TORCHRUN = "ChildFailedError"
CHECKPOINTS = "checkpoints/step-*"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a process ended."""

    text: str
    is_bad_input: bool = False


class RunLogs:
    """Log output of a run's processes from now on: logs go on from run to run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "logs"
        self._begins = {file.name: file.stat().st_size for file in self._folder.glob("*.log")}

    def path(self, name: str) -> Path:
        """The log of a process."""
        return self._folder / f"{name}.log"

    def lines(self, name: str) -> list[str]:
        """The last ones of a process."""
        file = self.path(name)
        try:
            with file.open("rb") as log:
                begin = max(self._begins.get(file.name, 0), log.seek(0, 2) - LAST_BYTES)
                log.seek(begin)
                return log.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    def failure(self, name: str, code: int, advice: str = "") -> CommandFailed:
        """The end of a command whose process ended with a status, in that process's words.

        Args:
            advice: how to go on, where there is something to go on with.
        """
        lines = self.lines(name)
        reason = reason_of(lines) if code > 0 else None
        if reason is not None:
            parts = [f"{name}: {reason.text}", f"its log: {self.path(name)}"]
        else:
            parts = [f"{name} {_ending(code)}; its log, {self.path(name)}, ends:"]
            parts += [f"  {line}" for line in lines[-LAST_LINES:]]
        if advice and "resume" not in parts[0]:
            parts.append(advice)
        is_bad_input = reason is not None and reason.is_bad_input
        return CommandFailed("\n".join(parts), EXIT_USAGE if is_bad_input else EXIT_FAILURE)


@contextmanager
def explain_failure(run: Run, config: LaunchConfig, resume: str) -> Iterator[None]:
    """Follow a run; a process that failed is named, with the reason in its own words.

    Args:
        resume: what goes on with a run that has a checkpoint.
    Raises:
        CommandFailed: a process failed.
    """
    run_dir = Path(config.trainer.run_dir).resolve()
    logs = RunLogs(run_dir)
    try:
        yield
    except (ConfigError, DataError):
        raise
    except ServiceError as error:
        failed = _first_failed(run, config)
        if failed is not None:
            advice = _advice(run_dir, config.trainer.recovery.resumes, resume)
            raise logs.failure(*failed, advice) from error
        if type(error) is ServiceError:  # its code would say nothing
            raise CommandFailed(str(error)) from error
        raise


def reason_of(lines: Sequence[str]) -> Reason | None:
    """The last words of a process; None if it left none."""
    plain = [RANK.sub("", line) for line in lines]
    reason = None
    for at, line in enumerate(plain):
        if match := SAID.match(line):
            text = "\n".join([line[match.end() :], *_until_foreign(plain[at + 1 :])])
            reason = Reason(text.rstrip(), is_bad_input=match["code"] is None)
        elif line.startswith(TRACEBACK):
            raised = _raised(plain[at + 1 :])
            if raised and OF_TORCHRUN not in raised:
                reason = Reason(f"{raised} (a crash: the traceback is in the log)")
    return reason


def _advice(run_dir: Path, resumes: bool, resume: str) -> str:
    """Return advice on how to go on, where there is a checkpoint."""
    if not any(run_dir.glob(CHECKPOINTS)):
        return ""
    return f"go on from the newest checkpoint with {'the same command' if resumes else resume}"


def _first_failed(run: Run, config: LaunchConfig) -> tuple[str, int] | None:
    """Name and status of the process that failed, services before the trainer that asks them."""
    for name in ("gateway", *(f"server-{n}" for n in range(config.num_servers)), "trainer"):
        try:
            code = run.process(name).exit_code()
        except KeyError:  # not started yet
            continue
        if code:
            return name, code
    return None


def _until_foreign(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if FOREIGN.match(line):
            return
        yield line


def _raised(lines: Sequence[str]) -> str:
    """The line of a traceback that names the exception."""
    return next((line for line in lines if line and not line[0].isspace()), "")


def _ending(code: int) -> str:
    return f"ended with status {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
