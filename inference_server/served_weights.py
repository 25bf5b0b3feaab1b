"""The weights that serve: how they were swapped in, and by which publication."""

from __future__ import annotations

import asyncio
import logging
import time

from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import ServiceError
from headway.contracts.http.weights import WeightPrepareRequest, WeightUpdateResponse
from inference_server.backends.base import GenerationBackend, StagedVersion
from weight_sync.channel import WeightReceiver

log = logging.getLogger(__name__)


class ServedWeights:
    """Swaps versions in, one at a time, and remembers the last."""

    def __init__(
        self, backend: GenerationBackend, receiver: WeightReceiver, policy: UpdatePolicy
    ) -> None:
        self._backend = backend
        self._receiver = receiver
        self._policy = policy
        self._last = WeightUpdateResponse(version=backend.version)
        self.epoch: int | None = None
        """Epoch of the publication; None if the version did not come by one."""
        self.path: str | None = None
        """Path of the publication; None as above."""
        self.updates = 0
        self.updates_in_flight = 0
        self.swap_s = 0.0
        """Seconds spent in swaps, with the wait for what a policy lets end first."""

    @property
    def response(self) -> WeightUpdateResponse:
        """Response to the last swap: the version that it made current."""
        if self._last.version == self._backend.version:
            return self._last
        # An attached engine brought its own.
        return WeightUpdateResponse(version=self._backend.version)

    async def swap(
        self, staged: StagedVersion, policy: UpdatePolicy | None
    ) -> WeightUpdateResponse:
        """Let a version serve, of no publication for now.

        Args:
            policy: None takes the server's.
        Raises:
            SyncError, BackendError: by the backend; the old version serves on, or none does.
        """
        before = time.monotonic()
        running = await self._backend.swap(staged, policy or self._policy)
        self.swap_s += time.monotonic() - before
        self.updates += 1
        self.updates_in_flight += running > 0
        version, digest = staged.version, staged.digest
        self._last = WeightUpdateResponse(version=version, running=running, digest=digest)
        await asyncio.to_thread(self._keep, staged)
        self.epoch = self.path = None
        return self._last

    def came_by(self, order: WeightPrepareRequest) -> None:
        """It came by the publication of this order."""
        self.epoch, self.path = order.epoch, order.path

    def _keep(self, staged: StagedVersion) -> None:
        """Keep it as the base of deltas, and for peers to fetch."""
        if staged.held is None or not staged.digest:
            return
        try:
            self._receiver.keep(staged.held)
        except (ServiceError, OSError) as error:
            log.warning("a version serves, but was not kept", extra={"reason": str(error)})
