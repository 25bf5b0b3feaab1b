"""Adapters of a whole fleet: each is loaded by all servers, or by none.

An adapter is recorded once every server that takes traffic has it. Servers that join later, or come back,
load what is recorded before they take traffic. Requests go to servers that hold their adapter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from urllib.parse import quote

from gateway.fleet.member import Member
from gateway.fleet.members import Members
from gateway.versions.adapter_state import AdapterRecord, AdapterState
from gateway.versions.shared_lock import SharedLock
from headway.contracts.adapters import next_adapter_version, not_loaded
from headway.contracts.config.gateway import FleetConfig
from headway.contracts.errors import Conflict, ServiceError, SyncError
from headway.contracts.http.adapters import AdapterRequest
from headway.contracts.http.paths import ADAPTER
from headway.contracts.types import PolicyVersion

log = logging.getLogger(__name__)


class FleetAdapters:
    """`AdapterHost` over the servers; used on one event loop."""

    def __init__(
        self, config: FleetConfig, members: Members, state: AdapterState, lock: SharedLock
    ) -> None:
        """Args:
        state: refreshed.
        """
        self._timeout_s = config.update_timeout_s
        self._members = members
        self._state = state
        self._lock = lock

    @property
    def versions(self) -> Mapping[str, PolicyVersion]:
        """See `AdapterHost`."""
        return {name: record.version for name, record in self._state.records.items()}

    @property
    def max_adapters(self) -> int:
        """What every server that takes traffic can hold."""
        return min((one.report.max_adapters for one in self._members.serving()), default=0)

    def check(self, name: str) -> None:
        """Check that an adapter is loaded.

        Raises:
            DataError: it is not.
        """
        if name not in self._state.records:
            raise not_loaded(name, self._state.records)

    async def load(
        self, name: str, path: str, version: PolicyVersion | None = None
    ) -> PolicyVersion:
        """See `AdapterHost`; every server reads the directory itself."""
        async with self._lock.held():
            await self._state.refresh()
            before = self._state.records.get(name)
            version = next_adapter_version(name, 0 if before is None else before.version, version)
            record = AdapterRecord(path=path, version=version)
            servers = self._members.serving()
            if not servers:
                raise Conflict(
                    "no server takes traffic now, so none can load an adapter; try again"
                )
            failures = await asyncio.gather(*(self._try(one, name, record) for one in servers))
            failed = {one.name: why for one, why in zip(servers, failures, strict=True) if why}
            if failed:
                loaded = [one for one in servers if one.name not in failed]
                await asyncio.gather(*(self._undo(one, name, before) for one in loaded))
                reasons = "; ".join(f"{server}: {why}" for server, why in failed.items())
                raise SyncError(f"adapter {name!r} was not loaded, and nothing changed: {reasons}")
            await self._state.put(name, record)
            return version

    async def unload(self, name: str) -> None:
        """See `AdapterHost`."""
        async with self._lock.held():
            await self._state.refresh()
            self.check(name)
            await self._state.remove(name)
            holders = [one for one in self._members.present() if name in one.adapters]
            await asyncio.gather(*(self._undo(one, name, None) for one in holders))

    async def refresh(self) -> None:
        """Read what other gateways loaded, and whether one is loading.

        Raises:
            StateError: the ledger cannot be reached.
        """
        await self._lock.look()
        await self._state.refresh()

    @property
    def is_changing(self) -> bool:
        """Servers are loading or unloading one right now, by whichever gateway."""
        return self._lock.is_held

    def is_current(self, member: Member) -> bool:
        """True if it holds these adapters and no others."""
        return member.adapters == self.versions

    async def bring(self, member: Member) -> None:
        """Have a server hold these adapters and no others.

        Raises:
            ServiceError: it cannot.
        """
        for name in [name for name in member.adapters if name not in self._state.records]:
            await self._drop(member, name)
        for name, record in dict(self._state.records).items():
            held = member.adapters.get(name)
            if held is not None and held > record.version:
                await self._drop(member, name)
            if held != record.version:
                await self._put(member, name, record)

    async def _try(self, member: Member, name: str, record: AdapterRecord) -> str:
        """Load it there; why that failed, empty if it did not or the server is lost."""
        try:
            await self._put(member, name, record)
        except ServiceError as error:
            return "" if member.state == "lost" else str(error)
        return ""

    async def _undo(self, member: Member, name: str, before: AdapterRecord | None) -> None:
        """Go back to what it served before under this name; it catches up if that fails."""
        try:
            await self._drop(member, name)
            if before is not None:
                await self._put(member, name, before)
        except ServiceError as error:
            log.warning("an adapter was not taken back", extra={"server": member.name})
            self._members.fence(member, f"adapter {name!r}: {error}")

    async def _put(self, member: Member, name: str, record: AdapterRecord) -> None:
        body = AdapterRequest(path=record.path, version=record.version)
        await self._members.order(member, _path(name), body, self._timeout_s, "PUT")
        self._members.note_adapters(member, {**member.adapters, name: record.version})

    async def _drop(self, member: Member, name: str) -> None:
        await self._members.order(member, _path(name), None, self._timeout_s, "DELETE")
        held = member.adapters
        self._members.note_adapters(
            member, {other: version for other, version in held.items() if other != name}
        )


def _path(name: str) -> str:
    return ADAPTER.format(name=quote(name, safe=""))
