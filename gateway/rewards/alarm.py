"""A limit of CPU time inside a process, for code that runs in its main thread."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN_S = 0.25


class TimeIsUp(BaseException):
    """Not an `Exception`: libraries swallow those."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeIsUp` in the body after this many CPU seconds, again and again until it is out.

    CPU time, because the load of the machine is no fault of the answer. What was interrupted may be left
    half done: the process is not to be used any further.
    """

    def ring(signum: int, frame: Any) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
