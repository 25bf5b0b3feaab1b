"""One version on its way in: it is read, waits for its commit, is swapped in, or has ended.

It belongs to no request: whoever asks for the same version next takes it over, and to go away ends
nothing. What ends it (an abort, a newer publication, its deadline) waits for nobody, and leaves at most
a reader that was told to give up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from headway.contracts.errors import SyncError
from headway.contracts.http.weights import WeightPrepareRequest, WeightUpdateResponse
from headway.contracts.types import GroupSeat, WeightUpdateMeta
from inference_server.backends.base import Staged
from weight_sync.patience import Patience

log = logging.getLogger(__name__)

Read = Callable[[WeightUpdateMeta, Patience], Staged]
Swap = Callable[[Staged], Awaitable[WeightUpdateResponse]]


class Staging:
    """What one version has come to; used on one event loop.

    Args:
        order: who asks for it.
        patience: of the reader.
        read: brings the version, called on a thread.
        turn: held while it is read, and while it is swapped in.
    """

    def __init__(
        self, order: WeightPrepareRequest, patience: Patience, read: Read, turn: asyncio.Lock
    ) -> None:
        self.order = order
        """The newest one that asks for it."""
        self.ended = ""
        """Why nobody wants it any more."""
        self._staged: Staged | None = None
        self._patience = patience
        self._turn = turn
        self._has_turn = False
        self._expiry: asyncio.TimerHandle | None = None
        self._swapping: asyncio.Task[WeightUpdateResponse] | None = None
        self.reading = asyncio.create_task(self._stage(read), name=f"stage {order.version}")
        """Ends with the digest."""
        self.reading.add_done_callback(_log_failure)
        self._expect()

    def answers(self, order: WeightPrepareRequest) -> bool:
        """Whether this is what an order asks for."""
        known = self.order
        if self.ended or known.version != order.version:
            return False
        if self._staged is not None and order.digest is not None and order.seat is None:
            return order.digest == self._staged.digest
        if known.seat is not None or order.seat is not None:  # in a group, each has its own place
            return (known.epoch, known.seat) == (order.epoch, order.seat)
        # What lies elsewhere under this number may be something else.
        return known.path == order.path and len({known.digest, order.digest} - {None}) < 2

    def adopt(self, order: WeightPrepareRequest) -> None:
        """It is for this order from now on."""
        digest = order.digest or self.order.digest
        self.order = order.model_copy(update={"digest": digest})
        if self._swapping is None:
            self._expect()

    async def digest(self) -> str:
        """Of the version, once it was read.

        Raises:
            SyncError: it was not read, or has ended.
        """
        await asyncio.wait({self.reading})  # does not cancel it when this call is cancelled
        if self.reading.cancelled():
            self._check()
        return self.reading.result()

    async def swap_in(self, swap: Swap) -> WeightUpdateResponse:
        """Swap it in, once: whoever asks meanwhile hears of the same swap.

        Raises:
            SyncError: it was not read yet, or has ended; by the backend, and it is still staged.
        """
        if self._swapping is None:
            self._check()
            if self._staged is None:
                raise SyncError(f"version {self.order.version} is still being staged")
            self._swapping = asyncio.create_task(self._commit(self._staged, swap))
            self._swapping.add_done_callback(_log_failure)
        swapping = self._swapping
        await asyncio.wait({swapping})
        return swapping.result()

    def abort(self, reason: str) -> None:
        """End it, unless it is being swapped in."""
        if self._swapping is None:
            self.end(reason)

    def end(self, reason: str) -> None:
        """Nobody wants it any more; a swap that has begun goes on."""
        self.ended = self.ended or reason
        self._staged = None
        self._hold()
        self._patience.give_up(reason)
        if not self._has_turn:
            self.reading.cancel()

    async def _stage(self, read: Read) -> str:
        try:
            async with self._turn:
                self._has_turn = True
                self._patience.progress()
                staged = await asyncio.to_thread(read, _meta_of(self.order), self._patience)
            self._check()
            self._prove(staged)
        except BaseException as error:
            self.end(f"version {self.order.version} was not staged: {error}")
            raise
        self._staged = staged
        self._expect()
        return staged.digest

    async def _commit(self, staged: Staged, swap: Swap) -> WeightUpdateResponse:
        self._hold()
        try:
            async with self._turn:
                self._check()
                return await swap(staged)
        except BaseException:
            self._swapping = None
            if not self.ended:
                self._expect()
            raise

    def _prove(self, staged: Staged) -> None:
        wanted = self.order.digest
        if wanted not in (None, staged.digest):
            raise SyncError(
                f"version {staged.version} at {self.order.path} has the digest {staged.digest!r}, "
                f"wanted was {wanted!r}; it was dropped"
            )

    def _check(self) -> None:
        if self.ended:
            raise SyncError(self.ended)

    def _expect(self) -> None:
        """Give the next step, reading or commit, as long as the order allows."""
        self._hold()
        order, step = self.order, "staged" if self._staged is None else "committed"
        reason = f"version {order.version} was not {step} within {order.timeout_s:g} s"
        self._expiry = asyncio.get_running_loop().call_later(order.timeout_s, self.end, reason)

    def _hold(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Whoever asked may be gone."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a weight update failed", extra={"reason": str(error)})


def _meta_of(order: WeightPrepareRequest) -> WeightUpdateMeta:
    seat = order.seat
    return WeightUpdateMeta(
        version=order.version,
        path=order.path,
        digest=order.digest,
        fallbacks=order.fallbacks,
        seat=None if seat is None else GroupSeat(order.epoch, seat.rank, seat.world_size),
    )
