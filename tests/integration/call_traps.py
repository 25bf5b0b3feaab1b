"""A module for `trainer.modules`: the process kills itself once within each of some calls.

`HEADWAY_CALL_TRAPS` is `ref_inf@2,critic_inf@3`: calls and their steps. The call has been asked for, what
it says is never heard of. `HEADWAY_CALL_MARKS` names a folder: a file there tells that it has happened.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.dataflow.trace import Trace

TRAPS = os.environ.get("HEADWAY_CALL_TRAPS", "").split(",")
MARKS = Path(os.environ.get("HEADWAY_CALL_MARKS", ""))
_span = Trace.span


@contextmanager
def _trapped(self: Trace, name: str, category: str, **details: Any) -> Iterator[None]:
    with _span(self, name, category, **details):
        yield
        trap = f"{name}@{details['step']}"
        if trap in TRAPS and not (MARKS / trap).exists():
            (MARKS / trap).touch()
            os.kill(os.getpid(), signal.SIGKILL)


Trace.span = _trapped  # type: ignore[method-assign]
