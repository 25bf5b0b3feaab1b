"""The edge of a command: our own errors become one clear line and an exit status."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType
from typing import NoReturn

from headway.contracts.errors import ConfigError, DataError, ServiceError

EXIT_USAGE = 2
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def run_command(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> NoReturn:
    """Run a command and end the process: 0, 2 on bad input, 1 on failure, 130 on Ctrl-C or SIGTERM.

    SIGTERM ends like Ctrl-C, so that children are ended and what is half-written is removed.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        main(argv)
    except (ConfigError, DataError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_USAGE)
    except ServiceError as error:
        sys.stderr.write(f"error [{error.code}]: {error}\n")
        sys.exit(EXIT_FAILURE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(0)


def import_main(module: str) -> Callable[[Sequence[str]], None]:
    """The `main` of a module, imported while the garbage collector rests.

    Nothing that an import makes is garbage: not to look for any takes a tenth off a start.
    """
    gc.disable()
    try:
        main: Callable[[Sequence[str]], None] = import_module(module).main
    finally:
        gc.enable()
    return main


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
