"""Stalls of an event loop: time in which it could not have answered anybody.

A timer on the loop sees how late it is called. What the machine owes is left out: time in which the
loop's thread was ready to run and had no CPU. A stand-still is seen as shorter than it was by up to
`TICK_S`; one that neither a request nor work of the loop preceded, by up to `IDLE_TICK_S`. An idle loop
is looked at seldom, which keeps the price below 0.1 % of a core.

Not covered: waiting for the interpreter's lock while the thread that holds it has no CPU; systems other
than Linux, where time without a CPU counts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import Self

log = logging.getLogger(__name__)

TICK_S = 0.02
IDLE_TICK_S = 0.25
IDLE_SHARE = 0.05
"""Share of a tick: a loop whose thread computed for less is idle."""
LONG_S = 0.1
"""A stand-still of at least so long is counted and logged."""


class StallWatch:
    """Watches the event loop that it is entered on, until it is left."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        """Seconds of the longest stand-still since the loop is watched."""
        self.num_long = 0
        """Stand-stills of at least `LONG_S`."""
        self._is_idle = False

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._delay = _RunDelay()
        self._expect(TICK_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._delay.close()
        self._is_idle = False

    def wake(self) -> None:
        """Look closely: something comes that the loop will work on."""
        if self._is_idle:
            self._is_idle = False
            self._timer.cancel()
            self._expect(TICK_S)

    def _expect(self, tick_s: float) -> None:
        self._delay_s = self._delay.read_s()
        self._cpu_s = time.thread_time()
        self._due = time.monotonic() + tick_s
        self._timer = self._loop.call_later(tick_s, self._look)

    def _look(self) -> None:
        late_s = time.monotonic() - self._due
        if late_s > self.longest_s or late_s >= LONG_S:
            self._note(late_s - (self._delay.read_s() - self._delay_s))
        self._is_idle = time.thread_time() - self._cpu_s < IDLE_SHARE * TICK_S
        self._expect(IDLE_TICK_S if self._is_idle else TICK_S)

    def _note(self, stall_s: float) -> None:
        self.longest_s = max(self.longest_s, stall_s)
        if stall_s >= LONG_S:
            self.num_long += 1
            log.warning("the event loop stood still", extra={"stall_s": round(stall_s, 3)})


class _RunDelay:
    """Seconds in which the thread that made it was ready and had no CPU."""

    def __init__(self) -> None:
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def read_s(self) -> float:
        if self._file < 0:
            return 0.0
        _, delay_ns, _ = os.pread(self._file, 64, 0).split()
        return int(delay_ns) / 1e9

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
