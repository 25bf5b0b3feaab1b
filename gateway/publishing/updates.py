"""Publications as their publisher asks for them: one at a time, shared by repeats, fenced by term."""

from __future__ import annotations

import logging

from gateway.consumers.consumers import Consumers, Publisher
from gateway.consumers.owners import Owners
from gateway.publishing.shared_update import SharedUpdate
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.engines import WeightUpdater
from headway.contracts.errors import ServiceError, SyncError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from headway.runtime.tasks import Signal

log = logging.getLogger(__name__)

ABANDON_S = 5.0
"""A publication that no request has waited for so long is given up: its publisher is gone."""


class WeightUpdates:
    """Publications by the attached consumer."""

    def __init__(
        self,
        weights: WeightUpdater,
        consumers: Consumers,
        owners: Owners,
        changed: Signal,
        abandon_s: float = ABANDON_S,
    ) -> None:
        """Args:
        weights: of the generator.
        consumers: who may publish.
        owners: whose the publisher's name is.
        changed: raised when a version is committed.
        abandon_s: seconds that an update goes on while no request waits for it.
        """
        self._weights = weights
        self._consumers = consumers
        self._owners = owners
        self._changed = changed
        self._abandon_s = abandon_s
        self._update: SharedUpdate | None = None
        self.count = 0
        """Committed updates."""

    async def update(
        self,
        meta: WeightUpdateMeta,
        policy: UpdatePolicy | None = None,
        publisher: Publisher | None = None,
    ) -> PolicyVersion:
        """Commit a version on every server.

        A repeat of the version that is under way waits for the same commit.

        Raises:
            Conflict: another consumer is attached.
            Fenced: a newer incarnation of the publisher has attached.
            Forbidden: it is another token's.
            SyncError: the version was refused or given up; the old one goes on serving.
        """
        await self._check_owner(publisher)
        await self._check(publisher)
        while (update := self._update) is not None and not update.is_done and update.meta != meta:
            await update.until_done()
            await self._check(publisher)
        if update is None or update.is_done:
            update = self._update = SharedUpdate(meta, self._publish(meta, policy), self._abandon_s)
        return await update.wait()

    async def cancel(
        self, version: PolicyVersion, reason: str, publisher: Publisher | None = None
    ) -> PolicyVersion:
        """The publisher gives a version up; returns the one that serves.

        Raises:
            Conflict, Fenced, Forbidden: as `update`.
        """
        await self._check_owner(publisher)
        await self._check(publisher)
        log.warning("version given up", extra={"version": version, "reason": reason})
        if self._update is not None and self._update.meta.version == version:
            await self._update.end(SyncError(f"version {version} was given up: {reason}"))
        await self._weights.cancel_update(version)
        return self._weights.version

    async def end(self, reason: ServiceError) -> None:
        """Give up what is under way, if it is not too late."""
        if self._update is not None:
            await self._update.end(reason)

    async def _check_owner(self, publisher: Publisher | None) -> None:
        if publisher is not None:
            await self._owners.check((publisher.name,))

    async def _check(self, publisher: Publisher | None) -> None:
        await self._consumers.refresh()
        self._consumers.check_publisher(publisher)

    async def _publish(self, meta: WeightUpdateMeta, policy: UpdatePolicy | None) -> PolicyVersion:
        before = self._weights.version
        version = await self._weights.update_weights(meta, policy)
        self.count += version != before
        self._changed.notify()
        return version
