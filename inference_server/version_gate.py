"""Stage, swap, forget: how a server changes its version while it generates.

`prepare` reads and verifies a version on a thread, `commit` swaps it in between two decode steps, `abort`
forgets it. What a commit does to running sequences is the update policy (`keep`, `recompute`, `abort`,
`drain`).

- Publications are numbered by epochs: the highest one known is obeyed, older ones are `Fenced`.
  Whether a version's number grows is no matter of the gate: a rollback is a publication like any other.
- What is staged belongs to the gate, not to the request that asked for it: a gateway that was killed
  finds it when it asks again. It is dropped when no commit comes in time.
- A swap that has begun is completed, even if its client is gone; a repeated commit gets its result.
- One version is staged at a time, besides the one that serves: `_turn` is held while one is read, and
  while one is swapped in. Who may end a staging (`abort`, a newer epoch, `drain`) does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import Draining, Fenced, StaleVersion, SyncError
from headway.contracts.http.weights import (
    WeightAbortRequest,
    WeightCommitRequest,
    WeightPrepareRequest,
    WeightUpdateResponse,
)
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from inference_server.backends.base import GenerationBackend, StagedVersion
from inference_server.served_weights import ServedWeights
from inference_server.staging import VersionStaging
from weight_sync.channel import WeightReceiver
from weight_sync.deadline import Deadline

log = logging.getLogger(__name__)

STAGE_TIMEOUT_S = 300.0
END_GRACE_S = 10.0
"""Seconds for a reader that was cancelled."""


@dataclass
class _State:
    epoch: int = 0
    """Highest epoch known."""
    staging: VersionStaging | None = None
    is_draining: bool = False


class VersionGate:
    """The one door through which weights enter a server; used on one event loop."""

    def __init__(
        self,
        backend: GenerationBackend,
        receiver: WeightReceiver,
        policy: UpdatePolicy = "keep",
        stage_timeout_s: float = STAGE_TIMEOUT_S,
    ) -> None:
        self._backend = backend
        self.receiver = receiver
        self.served = ServedWeights(backend, receiver, policy)
        self._stage_timeout_s = stage_timeout_s
        self._state = _State()
        self._turn = asyncio.Lock()

    @property
    def version(self) -> PolicyVersion:
        """Version that samples the next token."""
        return self._backend.version

    @property
    def digest(self) -> str:
        """Digest of that version; empty if it is not known, as of the first one."""
        return self.served.response.digest

    @property
    def epoch(self) -> int:
        """Highest epoch known."""
        return self._state.epoch

    async def prepare(self, order: WeightPrepareRequest) -> str:
        """Stage a version while generation goes on; return its digest.

        Cancelling the call leaves the staging to the next order for it.

        Raises:
            Fenced: a newer publication is known here.
            SyncError: torn, tampered, of another model, aborted, or not there in time.
            Draining: the server shuts down.
        """
        self._check_epoch(order.epoch)
        if self._state.is_draining:
            raise Draining("this server shuts down and takes no new version")
        staging = self._state.staging
        if staging is None or not staging.answers(order):
            self._end(f"epoch {order.epoch} came with version {order.version}")
            if self._serves(order):
                self.served.epoch = order.epoch
                return self.digest
            staging = self._begin(order)
        staging.adopt(order)
        try:
            return await staging.digest()
        except SyncError as error:
            if self._state.is_draining:
                raise Draining(f"this server shuts down: {error.message}") from error
            raise

    async def commit(self, order: WeightCommitRequest) -> WeightUpdateResponse:
        """Swap in what this epoch staged; sent again, it is answered without work.

        Raises:
            Fenced: a newer publication is known here.
            SyncError: this version is not staged, or the backend refuses it.
        """
        self._check_epoch(order.epoch)
        wanted, staging = (order.epoch, order.version), self._state.staging
        if staging is None or (staging.order.epoch, staging.order.version) != wanted:
            if (self.served.epoch, self.version) == wanted:
                return self.served.response
            held = None if staging is None else staging.order.version
            raise SyncError(f"version {order.version} is not prepared here (staged: {held})")

        return await staging.swap_in(order.policy)

    def abort(self, order: WeightAbortRequest) -> None:
        """Forget a version that is staged, or end its staging at once; what serves goes on.

        Raises:
            Fenced: a newer publication is known here.
        """
        self._check_epoch(order.epoch)
        staging = self._state.staging
        if staging is not None and staging.order.version == order.version:
            staging.abort(f"version {order.version} was aborted")

    async def update(
        self,
        number: Callable[[PolicyVersion], PolicyVersion],
        load: Callable[[PolicyVersion], StagedVersion],
        policy: UpdatePolicy | None = None,
    ) -> int:
        """Stage and commit under one lock, with no other update in between.

        Args:
            number: gives the new version, from the one that serves.
            load: brings it, called on a thread while generation goes on.
            policy: None takes the server's.
        Returns:
            Sequences that were running at the swap.
        Raises:
            StaleVersion: the number is not newer.
            SyncError: by `load` or the swap; the old version serves on.
        """
        async with self._turn:
            version = number(self.version)
            if version <= self.version:
                raise StaleVersion(
                    f"version {version} is not newer than {self.version}, which serves"
                )
            self._end(f"version {version} came by another way")
            staged = await asyncio.to_thread(load, version)
            return (await self.served.swap(staged, policy)).running

    def drain(self) -> None:
        """Stage nothing any more: a server that shuts down must not wait for a version."""
        self._state.is_draining = True
        if self._state.staging is not None:
            self._state.staging.abort("it stages nothing any more")

    async def aclose(self) -> None:
        """Let what was begun end."""
        self.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_GRACE_S), self._turn:
                pass
        self.receiver.close()

    def _serves(self, order: WeightPrepareRequest) -> bool:
        """True if an order is for the served version: a number alone is no proof, it may have come
        before.
        """
        if order.version != self.version:
            return False
        if order.digest is not None:
            return order.digest == self.digest
        return order.path == self.served.path

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._state.epoch:
            raise Fenced(
                f"epoch {epoch} is over: this server has heard of epoch {self._state.epoch}"
            )
        self._state.epoch = epoch

    def _begin(self, order: WeightPrepareRequest) -> VersionStaging:
        def read(meta: WeightUpdateMeta, deadline: Deadline) -> StagedVersion:
            return self._backend.stage(meta, self.receiver.within(deadline))

        def let_go() -> None:
            if self._state.staging is staging:
                self._state.staging = None

        staging = VersionStaging(
            order, Deadline(self._stage_timeout_s), read, self.served, self._turn, let_go
        )
        self._state.staging = staging
        return staging

    def _end(self, reason: str) -> None:
        if self._state.staging is not None:
            self._state.staging.end(reason)
            self._state.staging = None
