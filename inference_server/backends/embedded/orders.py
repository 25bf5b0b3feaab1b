"""Work for the engine's thread: given by any thread, done between two steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from headway.contracts.errors import BackendError

Order = Callable[[], None]


class Orders:
    """Orders in the sequence that they came in; the engine's thread sleeps here while it has none."""

    def __init__(self) -> None:
        self._waiting: deque[Order] = deque()
        self._wake = threading.Condition()
        self._failure: str | None = None
        self.is_closed = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, order: Order) -> None:
        """Queue an order, and wake the thread.

        Raises:
            BackendError: the engine died or was closed.
        """
        with self._wake:
            if self.is_closed:
                raise BackendError(self._failure or "the backend is closed")
            self._waiting.append(order)
            self._wake.notify()

    def nudge(self) -> None:
        """Wake the thread to look at what it has to do."""
        with self._wake:
            self._wake.notify()

    def close(self) -> None:
        """Take no more, and wake the thread to end."""
        with self._wake:
            self.is_closed = True
            self._wake.notify()

    def wait(self, is_due: Callable[[], bool]) -> bool:
        """Sleep until there are orders, work is due or no more orders are taken; return the last."""
        with self._wake:
            while not (self.is_closed or self._waiting or is_due()):
                self._wake.wait()
            return self.is_closed

    def carry_out(self) -> None:
        """Do what waits, one at a time: if one kills the engine, the others are not lost."""
        while self._waiting:
            self._waiting.popleft()()

    def take_rest(self, failure: str | None) -> deque[Order]:
        """Take no more, for the reason given, and return what nobody carried out."""
        with self._wake:
            self.is_closed = True
            self._failure = failure
            rest, self._waiting = self._waiting, deque()
        return rest
