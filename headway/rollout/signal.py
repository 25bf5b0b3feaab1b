"""Wakes everyone who waits for a change of some state."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes everyone who took `event()` before the last `notify()`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.count = 0
        """Notifications so far."""

    def event(self) -> asyncio.Event:
        """Take this before looking at the state, wait on it after."""
        return self._event

    def notify(self) -> None:
        """The state changed."""
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()
