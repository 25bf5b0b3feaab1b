"""The edge of a command: our own errors become one clear line and an exit status.

The errors are imported once there is one: with pydantic below them they would take longer than all else
that `--help` does.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import NoReturn

EXIT_USAGE = 2
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


class CommandFailed(Exception):
    """The end of a command that has nothing to add: its message, and the exit status."""

    def __init__(self, message: str, status: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        self.status = status


def run_command(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> NoReturn:
    """Run a command and end the process: 0, 2 on bad input, 1 on failure, 130 on Ctrl-C or SIGTERM.

    SIGTERM ends like Ctrl-C, so that children are ended and what is half-written is removed.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        main(argv)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        described = _describe(error)
        if described is None:
            raise
        text, status = described
        sys.stderr.write(f"{text}\n")
        sys.exit(status)
    sys.exit(0)


def import_main(module: str) -> Callable[..., None]:
    """The `main` of a module, imported while the garbage collector rests.

    Nothing that an import makes is garbage: not to look for any takes a tenth off a start.
    """
    with collector_at_rest():
        main: Callable[..., None] = import_module(module).main
    return main


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """For imports of much; the garbage collector is at work again after them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _describe(error: Exception) -> tuple[str, int] | None:
    """Return the message for an error, and the exit status; None for one that is not ours."""
    from headway.contracts.errors import ConfigError, DataError, ServiceError

    if isinstance(error, CommandFailed):
        return f"error: {error}", error.status
    if isinstance(error, ConfigError | DataError):
        return f"error: {error}", EXIT_USAGE
    if isinstance(error, ServiceError):
        return f"error [{error.code}]: {error}", EXIT_FAILURE
    return None


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
