"""Buckets that a trainer broadcasts, put together to updates, in SGLang's order of things.

Buckets are kept back (`_PendingSet`) and become visible together: at the end of a session; without one,
when the model is complete, when a bucket names the version while generation runs, when the version is
renamed, or when a paused server continues. So an update of some parameters is served, too, named or not.
Parameters that no bucket brought keep their value.

Receiving takes no lock, one bucket per group at a time: a trainer that went silent delays only itself.
When anything goes wrong with a bucket, all buckets before it are dropped with it and the weights that
serve go on; in a session, its end then fails and says why. A session that failed, or saw nothing for
`timeout_s`, belongs to a dead trainer: the next one may begin.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from headway.contracts.errors import ConfigError, Conflict, ServiceError, SyncError
from headway.dialects.sglang.relay import KeptBack
from headway.dialects.sglang.types import GroupUpdateBody, JoinGroupBody, UpdateBody
from inference_server.backends.base import GenerationBackend
from inference_server.dialects.sglang.weight_groups import WeightGroups
from weight_sync.transports.process_group import GroupAddress, TensorSpec, WeightsSource

log = logging.getLogger(__name__)

Published = TypeVar("Published")


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """Options of the publication of an update."""

    label: str | None = None
    aborts: bool = False
    """End running sequences; false leaves it to the server's policy."""
    flushes: bool = True

    def join(self, later: UpdateOptions) -> UpdateOptions:
        """The options of a set that these two buckets belong to."""
        return UpdateOptions(
            later.label or self.label, self.aborts or later.aborts, self.flushes or later.flushes
        )


@dataclass
class _PendingSet:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    options: UpdateOptions = UpdateOptions(flushes=False)


@dataclass
class _Session:
    touched: float
    failure: str | None = None


class GroupUpdates(Generic[Published]):
    """The updates of one server's trainers that come by process groups; used on one event loop."""

    def __init__(
        self,
        backend: GenerationBackend,
        timeout_s: float,
        publish: Callable[[Mapping[str, torch.Tensor], UpdateOptions], Awaitable[Published]],
        rename: Callable[[str], Awaitable[Published | None]],
    ) -> None:
        """
        Args:
            publish: called with all that an update has brought.
            rename: names the weights that serve.
        """
        self._backend = backend
        self._timeout_s = timeout_s
        self._publish = publish
        self._rename = rename
        self.joined = WeightGroups(timeout_s)
        """Groups that this server is in; their owner closes them."""
        self._pending = _PendingSet()
        self._session: _Session | None = None
        self._receiving = 0

    async def relabel(self, label: str) -> Published | None:
        """Name the update that is under way; if there is none, the weights that serve.

        Raises:
            ServiceError: the update cannot be published; nothing changed.
        """
        if self._session is None and not self._pending.tensors:
            return await self._rename(label)
        named = UpdateOptions(label, flushes=False)
        self._pending.options = self._pending.options.join(named)
        return await self.complete()

    async def complete(self) -> Published | None:
        """Publish buckets that came without a session, as they are; None if there are none.

        Raises:
            Conflict: a further bucket is being received.
            ServiceError: the set does not fit; nothing changed.
        """
        if self._session is not None or not self._pending.tensors:
            return None
        if self._receiving:
            raise Conflict("a bucket is still being received; go on after its answer")
        log.info(
            "publishing a part of the parameters",
            extra={"parameters": len(self._pending.tensors), "missing": len(self._missing())},
        )
        return await self._publish_pending()

    async def begin(self) -> None:
        """Open a session.

        Raises:
            Conflict: one is open.
        """
        session = self._session
        if session is not None and session.failure is None:
            idle_s = time.monotonic() - session.touched
            if self._receiving or idle_s < self._timeout_s:
                raise Conflict("a weight update session is open; end it with end_weight_update")
        self._pending = _PendingSet()
        self._session = _Session(time.monotonic())

    async def end(self) -> Published | None:
        """Publish what the session received, and close it; None if it received nothing.

        Raises:
            Conflict: no session is open.
            ServiceError: a bucket failed, or the set does not fit; nothing changed.
        """
        session = self._session
        if session is None:
            raise Conflict("no weight update session is open; begin one with begin_weight_update")
        if self._receiving:
            raise Conflict("a bucket is still being received; end the session after its answer")
        self._session = None
        if session.failure is not None:
            raise SyncError(f"nothing changed: {session.failure}")
        if self._pending.tensors:
            return await self._publish_pending()
        pending, self._pending = self._pending, _PendingSet()
        if pending.options.label is not None:
            return await self._rename(pending.options.label)
        return None

    async def join(self, address: GroupAddress) -> None:
        """Join a group; one of the same name, of a trainer before this one, is left first.

        Raises:
            SyncError: the others did not come within the time.
            ConfigError: the backend cannot take single tensors.
        """
        self._source()
        if address.name in self.joined:
            self._drop_pending(
                f"group {address.name!r} was joined again before the update was complete"
            )
            await self.leave(address.name)
        await self.joined.join(address)

    async def leave(self, name: str) -> int:
        """Leave a group; without a session, buckets that were not published are dropped.

        Returns:
            Number of parameters that were dropped.
        Raises:
            NotFound: we are in no group of this name.
        """
        dropped = 0
        if name in self.joined and self._session is None:
            dropped, self._pending = len(self._pending.tensors), _PendingSet()
        await self.joined.leave(name)
        return dropped

    async def receive(
        self, name: str, specs: Sequence[TensorSpec], is_flat: bool, options: UpdateOptions
    ) -> Published | KeptBack:
        """Receive a bucket.

        Raises:
            ServiceError: the peer died or went silent, or the bucket is of another model.
        """
        source = self._source()
        self._receiving += 1
        try:
            tensors = await self.joined.receive(name, specs, is_flat)
            await asyncio.to_thread(_check, tensors, source)
        except ServiceError as error:
            self._drop_pending(error.message)
            raise
        finally:
            self._receiving -= 1
            if self._session is not None:
                self._session.touched = time.monotonic()
        if self._session is None and not self._pending.tensors.keys().isdisjoint(tensors):
            await self.complete()  # what came before belongs to an earlier update
        self._pending.tensors.update(tensors)
        self._pending.options = self._pending.options.join(options)
        if self._session is not None:
            return self._kept_until("end_weight_update")
        is_named = options.label is not None and not self._backend.is_paused
        if is_named or not self._missing():
            return await self._publish_pending()
        return self._kept_until("continue_generation")

    def _missing(self) -> tuple[str, ...]:
        """Parameters of the model that are still missing."""
        return tuple(
            name for name in self._source().parameters if name not in self._pending.tensors
        )

    def _drop_pending(self, reason: str) -> None:
        self._pending = _PendingSet()
        if self._session is not None and self._session.failure is None:
            self._session.failure = reason

    async def _publish_pending(self) -> Published:
        pending, self._pending = self._pending, _PendingSet()
        return await self._publish(pending.tensors, pending.options)

    def _kept_until(self, call: str) -> KeptBack:
        missing = self._missing()
        return KeptBack(num_missing=len(missing), missing=missing[:1], until=call)

    def _source(self) -> WeightsSource:
        return weights_source(self._backend)


def address_of(body: JoinGroupBody) -> GroupAddress:
    """Return where a group meets."""
    return GroupAddress(
        body.group_name,
        body.master_address,
        body.master_port,
        body.rank_offset,
        body.world_size,
        body.backend,
    )


def specs_of(body: GroupUpdateBody) -> list[TensorSpec]:
    """Return what a bucket holds, in order."""
    described = zip(body.names, body.dtypes, body.shapes, strict=True)
    return [TensorSpec(name, dtype, shape) for name, dtype, shape in described]


def options_of(body: UpdateBody) -> UpdateOptions:
    """Return what an update asks for beside its weights."""
    return UpdateOptions(body.weight_version, body.abort_all_requests, body.flush_cache)


def weights_source(backend: GenerationBackend) -> WeightsSource:
    """The single parameters of a backend.

    Raises:
        ConfigError: it has none.
    """
    source: Any = backend
    if not isinstance(source, WeightsSource):
        raise ConfigError(
            "single parameters are not supported by this backend; use embedded_torch, or "
            "update_weights_from_disk"
        )
    return source


def _check(tensors: dict[str, torch.Tensor], source: WeightsSource) -> None:
    """Check that a bucket fits the model; after it was received, so that no trainer waits."""
    expected = source.parameters
    for name, tensor in tensors.items():
        if name in expected and expected[name] != tensor.shape:
            raise SyncError(
                f"{name} has shape {tuple(tensor.shape)}, the model wants {tuple(expected[name])}"
            )
    unknown = sorted(name for name in tensors if not _is_known(name, source))
    if unknown:
        raise SyncError(f"the model has no parameter {unknown[0]!r} ({len(unknown)} unknown names)")


def _is_known(name: str, source: WeightsSource) -> bool:
    if name in source.parameters:
        return True
    try:
        source.read_parameter(name)
    except ServiceError:
        return False
    return True
