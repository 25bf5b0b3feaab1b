"""The process groups by which trainers send buckets to a server, by their names.

One bucket is received per group at a time. What can block is done on threads that may be left behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from headway.contracts.errors import NotFound, SyncError
from inference_server.dialects.sglang.daemon_call import call_on_daemon
from weight_sync.transports.process_group import (
    GroupAddress,
    TensorSpec,
    WeightGroup,
    join_group,
)

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""Seconds beyond a deadline that the work keeps by itself, before we stop waiting for it."""


@dataclass
class _Member:
    group: WeightGroup
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class WeightGroups:
    """Groups that this server is in."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._members: dict[str, _Member] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    async def join(self, address: GroupAddress) -> None:
        """Join a group.

        Raises:
            SyncError: the others did not come within the time.
        """
        group = await call_on_daemon(
            partial(join_group, address, self._timeout_s),
            self._timeout_s + GRACE_S,
            f"joining group {address.name!r}",
            discard=WeightGroup.close,
        )
        self._members[address.name] = _Member(group)

    async def leave(self, name: str) -> None:
        """Leave a group.

        Raises:
            NotFound: we are in no group of this name.
        """
        member = self._members.pop(name, None)
        if member is None:
            raise NotFound("The group to be destroyed does not exist.")
        await self._close(member)

    async def receive(
        self, name: str, specs: Sequence[TensorSpec], is_flat: bool
    ) -> dict[str, torch.Tensor]:
        """Receive a bucket; after a failure we are in the group no more.

        Raises:
            NotFound: we are in no group of this name.
            SyncError: the peer died or went silent.
        """
        member = self._members.get(name)
        if member is None:
            raise NotFound(f"there is no group {name!r}; call init_weights_update_group first")
        work = member.group.receive_flattened if is_flat else member.group.receive
        what = f"receiving from group {name!r}"
        async with member.lock:
            try:
                return await call_on_daemon(partial(work, specs), self._timeout_s + GRACE_S, what)
            except SyncError:
                if self._members.get(name) is member:  # of no more use
                    del self._members[name]
                await self._close(member)
                raise

    async def _close(self, member: _Member) -> None:
        what = f"leaving group {member.group.address.name!r}"
        try:
            await call_on_daemon(member.group.close, GRACE_S, what)
        except (SyncError, RuntimeError) as error:
            log.warning("a weight update group did not close", extra={"reason": str(error)})

    async def aclose(self) -> None:
        """Leave all groups."""
        for name in list(self._members):
            await self._close(self._members.pop(name))
