"""Deadline of one end of a transfer that waits for the other."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

from headway.contracts.errors import SyncError
from headway.contracts.types import PolicyVersion

POLL_S = (0.001, 0.005)
"""Bounds in seconds of the pause between checks, which is a share of the silence so far."""
POLL_SHARE = 0.1


class Deadline:
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
    def remaining_s(self) -> float:
        """Seconds until the deadline without progress.

        Raises:
            SyncError: it has ended.
        """
        return self._checked()

    def check(self) -> None:
        """Return if the deadline has not passed.

        Raises:
            SyncError: it has ended.
        """
        self._checked()

    def restart(self) -> None:
        """Start the time again, since something came."""
        self._since = time.monotonic()

    def cancel(self, reason: str) -> None:
        """End all waiting now."""
        self._reason = reason
        self._over.set()

    def end_if_refused(self, version: PolicyVersion, decision: Future[PolicyVersion]) -> None:
        """End all waiting as soon as the service refuses the version."""

        def ended(decision: Future[PolicyVersion]) -> None:
            refusal = refusal_of(version, decision)
            if refusal is not None:
                self.cancel(refusal)

        decision.add_done_callback(ended)

    def pause(self) -> None:
        """Wait a moment before checking again, longer if nothing has happened for a while.

        Raises:
            SyncError: the deadline has passed.
        """
        shortest, longest = POLL_S
        silence_s = time.monotonic() - self._since
        seconds = min(max(POLL_SHARE * silence_s, shortest), longest)
        self._over.wait(min(seconds, self.remaining_s))
        self.check()

    def _checked(self) -> float:
        if self._over.is_set():
            raise SyncError(self._reason)
        left = self._since + self._timeout_s - time.monotonic()
        if left <= 0:
            raise SyncError(f"{self._what} made no progress for {self._timeout_s:g} s")
        return left


def refusal_of(version: PolicyVersion, decision: Future[PolicyVersion]) -> str | None:
    """Return why a service that has decided refused a version; None if it did not."""
    failure = None if decision.cancelled() else decision.exception()
    return None if failure is None else f"version {version} was refused: {failure}"
