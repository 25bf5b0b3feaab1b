"""The trainer's side of a broadcast: gathered by one thread, laid out and sent by another.

Gathered tensors stay in the CPU's memory until the version is published. So if the membership changes
midway, the version is sent once more, but not gathered again by all ranks of the trainer. The price is
one copy of the published weights (2 bytes per parameter in bfloat16, about 1 quantized) on the host of
rank 0 while it publishes, and two buckets always. Tensors that are on the CPU already are not copied:
they must not be written to before `publish` returns.

A group that sends from a GPU reads tensors of that GPU in place: their checksums are computed on it, and
the copy for the host, into pinned memory, is made while they are sent. At most `ON_DEVICE` buckets wait
there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import torch

from headway.contracts.config.weight_sync import CollectiveSync
from headway.contracts.errors import Fenced, SyncError
from headway.contracts.types import PolicyVersion
from weight_sync.deadline import Deadline, refusal_of
from weight_sync.store import version_name
from weight_sync.transports.broadcast_buckets import (
    BroadcastBucket,
    BucketQueue,
    SendBuffers,
)
from weight_sync.transports.daemon_calls import call_detached
from weight_sync.transports.groups import BroadcastGroup, meet_group
from weight_sync.transports.process_group import GroupAddress
from weight_sync.transports.rendezvous import (
    LOOK_S,
    BucketHeader,
    GroupSetup,
    RendezvousPlan,
    RendezvousStore,
    TransferEpoch,
)

T = TypeVar("T")


class Broadcast:
    """One version on its way to the members of a plan.

    An epoch that fails leaves the version as it is: the rest of `timeout_s` is there for a newer plan of
    those who are left. One thread runs it; `deadline` ends it from any other.
    """

    def __init__(
        self,
        host: RendezvousStore,
        version: PolicyVersion,
        config: CollectiveSync,
        bucket_queue: BucketQueue,
        deadline: Deadline,
        decision: Future[PolicyVersion] | None,
        group: BroadcastGroup | None,
        staging: SendBuffers,
        device: torch.device,
    ) -> None:
        """Args:
        decision: of the service; until it is there, members may ask for the version again. None: once
            they have it, nobody may.
        group: that of the version before.
        device: from which groups send.
        """
        self._rendezvous = host
        self._version = version
        self._config = config
        self._bucket_queue = bucket_queue
        self._deadline = deadline
        self._decision = decision
        self._peers = Deadline(config.timeout_s, f"the receivers of version {version}")
        self._send_buffers = staging
        self._device = device
        self._looked = 0.0
        self._num_announced = 0
        self.group = group
        """Process group that the next version may use again."""

    def run(self) -> None:
        """Return when all members have everything and the service has decided.

        Raises:
            SyncError: `deadline` has ended, or an epoch failed and no newer one came in time.
        """
        plan: RendezvousPlan | None = None
        failure: SyncError | None = None
        try:
            while True:
                plan = self._newer_plan(plan, failure)
                try:
                    self._serve(plan)
                except SyncError as error:
                    failure = error
                    continue
                if self._is_last(plan) and self._rendezvous.close_plan(
                    self._version, plan, "has been brought to all its members"
                ):
                    return
        except SyncError as error:
            self._close_any(f"was given up: {error.message}")
            raise

    def _newer_plan(self, last: RendezvousPlan | None, failure: SyncError | None) -> RendezvousPlan:
        try:
            return self._wait(lambda: self._plan_after(last), self._check_deadline)
        except SyncError as error:
            self._deadline.check()
            raise (failure or error) from None

    def _plan_after(self, last: RendezvousPlan | None) -> RendezvousPlan | None:
        plan = self._rendezvous.plan(self._version)
        return plan if plan is not None and (last is None or plan.epoch > last.epoch) else None

    def _is_last(self, plan: RendezvousPlan) -> bool:
        """Wait for the service's decision; false if members ask for the version again before it.

        A member that dies between its last byte and its answer ends the epoch for those who are left.
        """
        decision = self._decision
        if decision is None:
            return True

        def ask() -> bool | None:
            if decision.done():
                # Those that wait for it are woken before `end_if_refused` is told.
                refusal = refusal_of(self._version, decision)
                if refusal is not None:
                    raise SyncError(refusal)
                return True
            return False if self._plan_after(plan) else None

        self._deadline.restart()
        return self._wait(ask, self._deadline.check)

    def _serve(self, plan: RendezvousPlan) -> None:
        """One epoch."""
        current = self._rendezvous.begin_epoch(self._version, plan)

        def watch() -> None:
            self._check_deadline()
            if time.monotonic() - self._looked > LOOK_S:
                self._look(current, plan)

        self._num_announced = 0
        try:
            held_groups = self._wait(lambda: current.held_groups(plan.world_size), watch)
            group = self.group = self._join_group(current, plan, held_groups, watch)
            self._send(current, group, watch)
            current.add_bucket(BucketHeader(digest=self._bucket_queue.digest))
            self._wait(lambda: current.all_received(plan.world_size) or None, watch)
        except SyncError as error:
            with suppress(SyncError):
                current.fail(error)
            self._leave()
            self._send_buffers.drop()
            raise

    def _send(
        self, current: TransferEpoch, group: BroadcastGroup, watch: Callable[[], None]
    ) -> None:
        """Send all buckets; the next one is laid out, and announced, while one is sent."""
        number = 0
        while (bucket := self._bucket(current, number, watch)) is not None:
            group.begin_sending(self._send_buffers.lay_out(bucket), watch)
            if number > 0:
                self._finish(group, watch, number - 1)
            number += 1
        if number > 0:
            self._finish(group, watch, number - 1)

    def _finish(self, group: BroadcastGroup, watch: Callable[[], None], number: int) -> None:
        group.finish(watch)
        self._bucket_queue[number].move_to_host()
        self._peers.restart()

    def _join_group(
        self,
        current: TransferEpoch,
        plan: RendezvousPlan,
        held_groups: list[str],
        watch: Callable[[], None],
    ) -> BroadcastGroup:
        kept = self.group
        is_kept = kept is not None and kept.address.world_size == plan.world_size
        if kept is not None and is_kept and set(held_groups) == {kept.address.name}:
            current.announce_group(self._group_setup(kept.address.name, is_new=False))
            return kept
        self._leave()
        name = f"{version_name(self._version)}-{plan.epoch}"
        group_setup = self._group_setup(name, is_new=True)
        current.announce_group(group_setup)
        address = GroupAddress(
            name,
            self._rendezvous.host,
            self._rendezvous.port,
            0,
            plan.world_size,
            group_setup.backend,
        )

        def make() -> BroadcastGroup:
            store = self._rendezvous.connect()
            return meet_group(address, store, self._config.timeout_s, self._device)

        return call_detached(make, watch, discard=BroadcastGroup.close)

    def _group_setup(self, group: str, is_new: bool) -> GroupSetup:
        return GroupSetup(
            group=group,
            is_new=is_new,
            backend=self._config.backend,
            timeout_s=self._config.timeout_s,
        )

    def _bucket(
        self, current: TransferEpoch, number: int, watch: Callable[[], None]
    ) -> BroadcastBucket | None:
        """The n-th one; None behind the last."""
        while number >= len(self._bucket_queue):
            if self._bucket_queue.digest is not None and number >= len(self._bucket_queue):
                return None
            watch()
            self._peers.restart()  # the wait is for ourselves
            self._bucket_queue.wait(LOOK_S)
        self._tell(current)
        return self._bucket_queue[number]

    def _tell(self, current: TransferEpoch) -> None:
        """Announce the new buckets: receivers allocate one while the one before is sent."""
        while self._num_announced < len(self._bucket_queue):
            bucket = self._bucket_queue[self._num_announced]
            current.add_bucket(BucketHeader(entries=bucket.entries, size=bucket.size))
            self._num_announced += 1

    def _look(self, current: TransferEpoch, plan: RendezvousPlan) -> None:
        failure = current.failure()
        if failure is not None:
            raise failure
        newest = self._rendezvous.plan(self._version)
        if newest is not None and newest.epoch > plan.epoch:
            raise Fenced(
                f"epoch {plan.epoch} of version {self._version} was superseded by epoch {newest.epoch}"
            )
        self._tell(current)
        self._looked = time.monotonic()

    def _check_deadline(self) -> None:
        self._deadline.check()
        self._peers.check()

    def _wait(self, ask: Callable[[], T | None], watch: Callable[[], None]) -> T:
        while (answer := ask()) is None:
            watch()
            self._deadline.pause()
        self._peers.restart()
        return answer

    def _close_any(self, reason: str) -> None:
        with suppress(SyncError):
            while not self._rendezvous.close_plan(
                self._version, self._rendezvous.plan(self._version), reason
            ):
                continue

    def _leave(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None
