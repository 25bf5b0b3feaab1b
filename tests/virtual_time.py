"""An event loop whose time passes only while nothing else happens, and then at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from selectors import DefaultSelector, SelectorKey
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(DefaultSelector):
    """Skips the time for which the loop would sleep."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        ready = super().select(0 if timeout else timeout)
        if not ready and timeout is not None:
            self._jump(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Begins at 0 s. Threads and processes take no time of it, so use it without them."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._virtual_s

    def _jump(self, seconds: float) -> None:
        self._virtual_s += max(0.0, seconds)


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, run on virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
