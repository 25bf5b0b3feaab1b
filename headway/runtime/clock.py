"""The clock of deadlines, leases and heartbeats.

What waits uses `asyncio.sleep` and `asyncio.timeout`, which go by the running loop's time. What compares
moments takes them from here, by the same clock. So on a loop with a time of its own (a simulator's) the
fleet, its publications and their timeouts run on that time, and nothing else has to be replaced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def monotonic() -> float:
    """Seconds by the running event loop's clock, which never goes back; outside of a loop, by the
    process's."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def running_clock() -> Callable[[], float]:
    """Return `monotonic` for the loop that runs now, for objects that ask it for every request.

    On Python 3.11 it takes a system call to find the loop, five times as long as to read its time.
    """
    try:
        return asyncio.get_running_loop().time
    except RuntimeError:
        return monotonic
