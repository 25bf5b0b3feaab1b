"""Weights that somebody else's trainer publishes: one transaction over the fleet for each version."""

from __future__ import annotations

import asyncio

from gateway.app.fleet import Fleet
from gateway.publishing.updates import WeightUpdates
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from headway.dialects.sglang.version_labels import START_LABEL, next_version

SCHEME = "model://"


class ForeignWeights:
    """Publications of a trainer that names versions by text, or not at all."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = asyncio.Lock()

    @property
    def newest_path(self) -> str | None:
        """Directory of the version that was published last, if it was published from one."""
        path = self._fleet.weights.newest_path
        return None if path is None or not path.startswith(SCHEME) else path.removeprefix(SCHEME)

    def label(self, version: PolicyVersion) -> str:
        """The text by which clients know a version."""
        return self._fleet.weights.label(version) or (str(version) if version else START_LABEL)

    async def publish(
        self, updates: WeightUpdates, path: str, label: str | None, aborts: bool
    ) -> str:
        """Publish a directory on every server; return the label of what serves then.

        Args:
            label: of the version; None names it by its number.
            aborts: end running sequences; false leaves it to the servers' policy.
        Raises:
            ServiceError: it was not published; the old version serves on.
        """
        async with self._lock:
            version = next_version(label, self._fleet.head)
            meta = WeightUpdateMeta(version, SCHEME + path, label=label)
            serving = await updates.update(meta, "abort" if aborts else None)
        return self.label(serving)

    async def publish_version(
        self, updates: WeightUpdates, meta: WeightUpdateMeta, aborts: bool
    ) -> None:
        """Publish a version that has its number.

        Raises:
            ServiceError: it was not published; the old version serves on.
        """
        async with self._lock:
            await updates.update(meta, "abort" if aborts else None)
