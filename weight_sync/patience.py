"""How long one end of a transfer waits for the other."""

from __future__ import annotations

import threading
import time

from headway.contracts.errors import SyncError

POLL_S = (0.001, 0.005)
"""Between looks: a share of the silence so far, between these."""
POLL_SHARE = 0.1


class Patience:
    """A deadline that progress puts off, and that any thread can end early.

    One thread waits; `progress` and `give_up` may come from others.
    """

    def __init__(self, timeout_s: float, what: str = "the publisher") -> None:
        self._timeout_s = timeout_s
        self._what = what
        self._since = time.monotonic()
        self._over = threading.Event()
        self._reason = ""

    @property
    def left_s(self) -> float:
        """Seconds until patience ends without progress.

        Raises:
            SyncError: it has ended.
        """
        if self._over.is_set():
            raise SyncError(self._reason)
        left = self._since + self._timeout_s - time.monotonic()
        if left <= 0:
            raise SyncError(f"{self._what} made no progress for {self._timeout_s:g} s")
        return left

    def progress(self) -> None:
        """Something came: the time begins anew."""
        self._since = time.monotonic()

    def give_up(self, reason: str) -> None:
        """End all waiting now."""
        self._reason = reason
        self._over.set()

    def pause(self) -> None:
        """Wait a moment before looking again, a longer one where nothing has happened for long.

        Raises:
            SyncError: patience has ended.
        """
        shortest, longest = POLL_S
        silence_s = time.monotonic() - self._since
        seconds = min(max(POLL_SHARE * silence_s, shortest), longest)
        self._over.wait(min(seconds, self.left_s))
        _ = self.left_s
