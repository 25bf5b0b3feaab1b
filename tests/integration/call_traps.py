"""A module for `trainer.modules`: the process kills itself within one call of one step.

`HEADWAY_CALL_TRAP` is `ref_inf@2`. The call has been asked for, what it says is never heard of. Where
`HEADWAY_CALL_TRAP_MARK` names a file, it happens once: the file is left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.dataflow.trace import Trace

NAME, _, STEP = os.environ.get("HEADWAY_CALL_TRAP", "").partition("@")
MARK = os.environ.get("HEADWAY_CALL_TRAP_MARK")
_span = Trace.span


def _die() -> None:
    if MARK is not None:
        if Path(MARK).exists():
            return
        Path(MARK).touch()
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _trapped(self: Trace, name: str, category: str, **details: Any) -> Iterator[None]:
    with _span(self, name, category, **details):
        yield
        if name == NAME and details["step"] == int(STEP):
            _die()


Trace.span = _trapped  # type: ignore[method-assign]
