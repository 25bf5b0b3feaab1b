"""Stage, swap, forget: how a server changes its version while it generates.

`prepare` reads and proves a version on a thread, `commit` swaps it in between two decode steps, `abort`
forgets it. What a commit does to running sequences is the update policy (`keep`, `recompute`, `abort`,
`drain`).

- Publications are numbered by epochs: the highest that was heard of is obeyed, older ones are `Fenced`.
  Whether a version's number grows is no matter of the gate: a rollback is a publication like any other.
- What is staged belongs to the gate, not to the request that asked for it: a gateway that was killed
  finds it when it asks again. It is dropped when no commit comes in time.
- A swap that has begun ends, whoever is left to hear of it; a commit sent again hears of the same one.
- One version is staged at a time, besides the one that serves: `_turn` is held while one is read, and
  while one is swapped in. Who may end a staging (`abort`, a newer epoch, `drain`) does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import Draining, Fenced, ServiceError, StaleVersion, SyncError
from headway.contracts.http.weights import (
    WeightAbortRequest,
    WeightCommitRequest,
    WeightPrepareRequest,
    WeightUpdateResponse,
)
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from inference_server.backends.base import GenerationBackend, Staged
from inference_server.staging import Staging
from weight_sync.channel import WeightReceiver
from weight_sync.patience import Patience

log = logging.getLogger(__name__)

STAGE_TIMEOUT_S = 300.0
END_GRACE_S = 10.0
"""For a reader that was told to give up."""


@dataclass
class _State:
    served: WeightUpdateResponse
    """What the last swap put in place."""
    served_epoch: int | None = None
    """Whose publication that was; None if it did not come through `prepare`."""
    served_path: str | None = None
    """Where it was published; None as above."""
    epoch: int = 0
    """The highest that was heard of."""
    staging: Staging | None = None
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
        self._policy = policy
        self._stage_timeout_s = stage_timeout_s
        self._state = _State(WeightUpdateResponse(version=backend.version))
        self._turn = asyncio.Lock()
        self.updates = 0
        self.updates_in_flight = 0
        self.swap_s = 0.0
        """Seconds spent in swaps, with the wait for what a policy lets end first."""

    @property
    def version(self) -> PolicyVersion:
        """Version that samples the next token."""
        return self._backend.version

    @property
    def digest(self) -> str:
        """Of that version; empty if it is not known, as of the first one."""
        return self._served.digest

    @property
    def epoch(self) -> int:
        """The highest that was heard of."""
        return self._state.epoch

    async def prepare(self, order: WeightPrepareRequest) -> str:
        """Stage a version while generation goes on; its digest.

        Cancelling the call leaves the staging to whoever asks next.

        Raises:
            Fenced: a newer publication is known here.
            SyncError: torn, tampered, of another model, aborted, or not there in time.
            Draining: the server shuts down.
        """
        self._heed(order.epoch)
        if self._state.is_draining:
            raise Draining("this server shuts down and takes no new version")
        staging = self._state.staging
        if staging is None or not staging.answers(order):
            self._end(f"epoch {order.epoch} came with version {order.version}")
            if self._serves(order):
                self._state.served_epoch = order.epoch
                return self.digest
            staging = self._begin(order)
        staging.adopt(order)
        return await staging.digest()

    async def commit(self, order: WeightCommitRequest) -> WeightUpdateResponse:
        """Swap in what this epoch staged; sent again, it is answered without work.

        Raises:
            Fenced: a newer publication is known here.
            SyncError: this version is not staged, or the backend refuses it.
        """
        self._heed(order.epoch)
        state, wanted = self._state, (order.epoch, order.version)
        staging = state.staging
        if staging is None or (staging.order.epoch, staging.order.version) != wanted:
            if (state.served_epoch, self.version) == wanted:
                return self._served
            held = None if staging is None else staging.order.version
            raise SyncError(f"version {order.version} is not prepared here (staged: {held})")

        return await staging.swap_in(partial(self._commit, staging, order.policy))

    def abort(self, order: WeightAbortRequest) -> None:
        """Forget a version that is staged, or end its staging at once; what serves goes on.

        Raises:
            Fenced: a newer publication is known here.
        """
        self._heed(order.epoch)
        staging = self._state.staging
        if staging is not None and staging.order.version == order.version:
            staging.abort(f"version {order.version} was aborted")

    async def update(
        self,
        number: Callable[[PolicyVersion], PolicyVersion],
        load: Callable[[PolicyVersion], Staged],
        policy: UpdatePolicy | None = None,
    ) -> int:
        """Stage and commit in one turn, between which nobody else's update comes.

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
            answer = await self._swap(staged, policy)
            self._state.served_epoch = self._state.served_path = None
            return answer.running

    def drain(self) -> None:
        """Stage nothing any more: a server that shuts down must not wait for a version."""
        self._state.is_draining = True
        if self._state.staging is not None:
            self._state.staging.abort("the server shuts down")

    async def aclose(self) -> None:
        """Let what was begun end."""
        self.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_GRACE_S), self._turn:
                pass
        self.receiver.close()

    @property
    def _served(self) -> WeightUpdateResponse:
        served = self._state.served
        if served.version == self.version:
            return served
        return WeightUpdateResponse(version=self.version)  # an attached engine brought its own

    def _serves(self, order: WeightPrepareRequest) -> bool:
        """Whether an order is for what serves: a number alone is no proof, it may have come before."""
        if order.version != self.version:
            return False
        if order.digest is not None:
            return order.digest == self.digest
        return order.path == self._state.served_path

    def _heed(self, epoch: int) -> None:
        if epoch < self._state.epoch:
            raise Fenced(
                f"epoch {epoch} is over: this server has heard of epoch {self._state.epoch}"
            )
        self._state.epoch = epoch

    def _begin(self, order: WeightPrepareRequest) -> Staging:
        def read(meta: WeightUpdateMeta, patience: Patience) -> Staged:
            return self._backend.stage(meta, self.receiver.within(patience))

        def let_go(reading: asyncio.Task[str]) -> None:
            if staging.ended:  # its failure holds what was read so far
                self._leave(staging)

        staging = Staging(order, Patience(self._stage_timeout_s), read, self._turn)
        staging.reading.add_done_callback(let_go)
        self._state.staging = staging
        return staging

    def _end(self, reason: str) -> None:
        if self._state.staging is not None:
            self._state.staging.end(reason)
            self._state.staging = None

    def _leave(self, staging: Staging) -> None:
        if self._state.staging is staging:
            self._state.staging = None

    async def _commit(
        self, staging: Staging, policy: UpdatePolicy | None, staged: Staged
    ) -> WeightUpdateResponse:
        answer = await self._swap(staged, policy)
        self._state.served_epoch = staging.order.epoch  # a gateway may have asked for it again
        self._state.served_path = staging.order.path
        self._leave(staging)
        return answer

    async def _swap(self, staged: Staged, policy: UpdatePolicy | None) -> WeightUpdateResponse:
        before = time.monotonic()
        running = await self._backend.swap(staged, policy or self._policy)
        self.swap_s += time.monotonic() - before
        self.updates += 1
        self.updates_in_flight += running > 0
        version, digest = staged.version, staged.digest
        self._state.served = WeightUpdateResponse(version=version, running=running, digest=digest)
        await asyncio.to_thread(self._keep, staged)
        return self._state.served

    def _keep(self, staged: Staged) -> None:
        """From now on the base of deltas, and what peers fetch."""
        if staged.held is None or not staged.digest:
            return
        try:
            self.receiver.keep(staged.held)
        except (ServiceError, OSError) as error:
            log.warning("a version serves, but was not kept", extra={"reason": str(error)})
