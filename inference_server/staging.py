"""One version on its way in: it is read, waits for its commit, is swapped in, or has ended.

It belongs to no request: the next order for the same version takes it over, and a client that goes away
ends nothing. An abort, a newer publication or its deadline ends it at once, and leaves at most a reader
that was cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import SyncError
from headway.contracts.http.weights import WeightPrepareRequest, WeightUpdateResponse
from headway.contracts.types import GroupRank, WeightUpdateMeta
from inference_server.backends.base import StagedVersion
from inference_server.served_weights import ServedWeights
from weight_sync.deadline import Deadline

log = logging.getLogger(__name__)

Read = Callable[[WeightUpdateMeta, Deadline], StagedVersion]


class VersionStaging:
    """State of one version on its way in; used on one event loop.

    Args:
        order: the order that asks for it.
        deadline: deadline of the reader.
        read: brings the version, called on a thread.
        served: lets it serve.
        turn: held while it is read, and while it is swapped in.
        on_over: called when it serves, or could not be read: it is of no more use.
    """

    def __init__(
        self,
        order: WeightPrepareRequest,
        deadline: Deadline,
        read: Read,
        served: ServedWeights,
        turn: asyncio.Lock,
        on_over: Callable[[], None],
    ) -> None:
        self.order = order
        """The newest one that asks for it."""
        self.ended = ""
        """Why it has ended; empty before."""
        self._staged: StagedVersion | None = None
        self._deadline = deadline
        self._served = served
        self._turn = turn
        self._on_over = on_over
        self._has_turn = False
        self._expiry: asyncio.TimerHandle | None = None
        self._swapping: asyncio.Task[WeightUpdateResponse] | None = None
        self.reading = asyncio.create_task(self._stage(read), name=f"stage {order.version}")
        """Task that reads it and returns the digest."""
        self.reading.add_done_callback(_log_failure)
        self.reading.add_done_callback(self._after_reading)
        self._expect()

    def answers(self, order: WeightPrepareRequest) -> bool:
        """True if this is the version that an order asks for."""
        known = self.order
        if self.ended or known.version != order.version:
            return False
        if self._staged is not None and order.digest is not None and order.group_rank is None:
            return order.digest == self._staged.digest
        if (
            known.group_rank is not None or order.group_rank is not None
        ):  # in a group, each rank is another transfer
            return (known.epoch, known.group_rank) == (order.epoch, order.group_rank)
        # Another path may hold other weights under this number.
        return known.path == order.path and len({known.digest, order.digest} - {None}) < 2

    def adopt(self, order: WeightPrepareRequest) -> None:
        """Let it answer this order from now on."""
        digest = order.digest or self.order.digest
        self.order = order.model_copy(update={"digest": digest})
        if self._swapping is None:
            self._expect()

    async def digest(self) -> str:
        """Return the digest of the version, once it was read.

        Raises:
            SyncError: it was not read, or has ended.
        """
        await asyncio.wait({self.reading})  # does not cancel it when this call is cancelled
        if self.reading.cancelled():
            self._check()
        return self.reading.result()

    async def swap_in(self, policy: UpdatePolicy | None) -> WeightUpdateResponse:
        """Swap it in, once: concurrent calls get the result of the same swap.

        Args:
            policy: None takes the server's.
        Raises:
            SyncError: it was not read yet, or has ended; by the backend, and it is still staged.
        """
        if self._swapping is None:
            self._check()
            if self._staged is None:
                raise SyncError(f"version {self.order.version} is still being staged")
            self._swapping = asyncio.create_task(self._commit(self._staged, policy))
            self._swapping.add_done_callback(_log_failure)
        swapping = self._swapping
        await asyncio.wait({swapping})
        return swapping.result()

    def abort(self, reason: str) -> None:
        """End it, unless it is being swapped in."""
        if self._swapping is None:
            self.end(reason)

    def end(self, reason: str) -> None:
        """End it for this reason; a swap that has begun goes on."""
        self.ended = self.ended or reason
        self._staged = None
        self._hold()
        self._deadline.cancel(reason)
        if not self._has_turn:
            self.reading.cancel()

    async def _stage(self, read: Read) -> str:
        try:
            async with self._turn:
                self._has_turn = True
                self._deadline.restart()
                staged = await asyncio.to_thread(read, _meta_of(self.order), self._deadline)
            self._check()
            self._prove(staged)
        except BaseException as error:
            self.end(f"version {self.order.version} was not staged: {error}")
            raise
        self._staged = staged
        self._expect()
        return staged.digest

    async def _commit(
        self, staged: StagedVersion, policy: UpdatePolicy | None
    ) -> WeightUpdateResponse:
        self._hold()
        try:
            async with self._turn:
                self._check()
                answer = await self._served.swap(staged, policy)
                self._served.came_by(self.order)  # a gateway may have asked for it again
                self._staged = None  # its memory is for the next version
                self._on_over()
                return answer
        except BaseException:
            self._swapping = None
            if not self.ended:
                self._expect()
            raise

    def _after_reading(self, reading: asyncio.Task[str]) -> None:
        if self.ended:  # its failure holds what was read so far
            self._on_over()

    def _prove(self, staged: StagedVersion) -> None:
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
    """Log a failure, since the client may be gone."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a weight update failed", extra={"reason": str(error)})


def _meta_of(order: WeightPrepareRequest) -> WeightUpdateMeta:
    group_rank = order.group_rank
    return WeightUpdateMeta(
        version=order.version,
        path=order.path,
        digest=order.digest,
        fallbacks=order.fallbacks,
        group_rank=None
        if group_rank is None
        else GroupRank(order.epoch, group_rank.rank, group_rank.world_size),
    )
