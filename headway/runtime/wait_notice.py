"""A line in the log for who waits, now and then, and ever more seldom."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

FIRST_S = 5.0


class WaitNotice:
    """Tells what is waited for, after `first_s`, and each time that the wait has doubled since."""

    def __init__(self, what: str, first_s: float = FIRST_S) -> None:
        self._what = what
        self._began = time.monotonic()
        self._next_s = first_s

    def log_if_due(self, reason: str = "") -> None:
        """To be called at every look."""
        waited_s = time.monotonic() - self._began
        if waited_s < self._next_s:
            return
        self._next_s = max(FIRST_S, 2 * waited_s)
        extra = {"reason": reason} if reason else {}
        log.warning("waiting for %s, %.0f s", self._what, waited_s, extra=extra)
