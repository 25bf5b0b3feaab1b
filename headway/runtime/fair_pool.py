"""Turns at what is scarce: callers take it in rounds, and no clock of theirs runs while they wait.

Who calls is in the context of the task (`CALLER`), so that what is shared need not be made again for
everybody.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")

CALLER: ContextVar[str] = ContextVar("caller", default="")
"""On whose behalf a task runs: a consumer, or a route."""
_LIMIT: ContextVar[asyncio.Timeout | None] = ContextVar("limit", default=None)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Like `asyncio.timeout`, without the time spent waiting for a turn.

    Raises:
        TimeoutError: it is over.
    """
    async with asyncio.timeout(seconds) as limit:
        before = _LIMIT.set(limit)
        try:
            yield
        finally:
            _LIMIT.reset(before)


@contextmanager
def clock_stopped() -> Iterator[None]:
    """Stop the clock of the `time_limit` around this block."""
    limit, loop = _LIMIT.get(), asyncio.get_running_loop()
    until = None if limit is None else limit.when()
    if limit is None or until is None:  # none, or one that another task has stopped
        yield
        return
    left_s = until - loop.time()
    _reschedule(limit, None)
    try:
        yield
    finally:
        _reschedule(limit, loop.time() + left_s)


def _reschedule(limit: asyncio.Timeout, when: float | None) -> None:
    with suppress(RuntimeError):  # its block has ended, with this task still on its way
        limit.reschedule(when)


class FairPool(Generic[T]):
    """Things that callers hold one at a time, and who is next.

    What comes back goes to the caller that has waited longest since its last turn, whatever the others
    want. Spare things are for callers that hold none, so that no caller waits for what another keeps. A
    caller holds at most as many as there are without the spare ones.
    """

    def __init__(self, things: Iterable[T], spare: Iterable[T] = ()) -> None:
        self._free, self._spare = list(things), list(spare)
        self._most = len(self._free)
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[T]]] = OrderedDict()
        self._spares = frozenset(map(id, self._spare))

    @asynccontextmanager
    async def take(self) -> AsyncIterator[T]:
        """Wait for a turn, and give the thing back at the end of the block."""
        caller = CALLER.get()
        thing = await self._next_for(caller)
        try:
            yield thing
        finally:
            self._give_back(caller, thing)

    async def _next_for(self, caller: str) -> T:
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._hand_out()
        if turn.done():
            return turn.result()
        try:
            with clock_stopped():
                return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(caller, turn.result())
            raise

    def _give_back(self, caller: str, thing: T) -> None:
        self._held[caller] -= 1
        self._held += Counter()  # forget who holds none
        (self._spare if id(thing) in self._spares else self._free).append(thing)
        self._hand_out()

    def _hand_out(self) -> None:
        while (caller := self._next_caller()) is not None:
            line = self._waiting.pop(caller)
            turn = line.popleft()
            if line:
                self._waiting[caller] = line  # behind the others
            if not turn.cancelled():
                self._held[caller] += 1
                turn.set_result((self._free or self._spare).pop())

    def _next_caller(self) -> str | None:
        if self._free:
            most = self._most
        elif self._spare:
            most = 1
        else:
            return None
        return next((name for name in self._waiting if self._held[name] < most), None)
