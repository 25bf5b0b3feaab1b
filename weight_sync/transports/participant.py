"""A server's part in a rendezvous: it proposes itself, joins, and follows the buckets."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

from torch._C._distributed_c10d import Store

from headway.contracts.errors import Fenced, SyncError
from headway.contracts.types import GroupRank, PolicyVersion
from weight_sync.deadline import Deadline
from weight_sync.store import Announcement, version_name
from weight_sync.transports.handles import check_reachable
from weight_sync.transports.nccl import Build, check_same
from weight_sync.transports.rendezvous import (
    LOOK_S,
    BucketHeader,
    GroupSetup,
    RendezvousPlan,
    Requirements,
    TransferEpoch,
    asking,
    connect,
    parse,
)

T = TypeVar("T")


class Participant:
    """One server in the transfer of a version; it may stand for several ranks of its engine.

    A server whose engine's processes are the ranks joins for them, lets them join the
    `GroupSetup`'s group (SGLang's `init_weights_update_group`, at this address), and has them take part
    in one broadcast for every bucket.
    """

    def __init__(
        self,
        path: str,
        version: PolicyVersion,
        group_rank: GroupRank,
        deadline: Deadline,
        num_ranks: int = 1,
        build: Build | None = None,
    ) -> None:
        """Take part in the version at `path`, `<backend>://host:port/v00000007`.

        Args:
            build: of the processes that will join the group; None if it is not known.
        Raises:
            SyncError: the trainer cannot be reached, the version is not announced any more, it went to
                others, or this machine does not meet the trainer's requirements.
            Fenced: a newer epoch takes part in it.
        """
        self.path = path
        self.host, self.port = address_of(path)
        self.ranks = range(group_rank.rank, group_rank.rank + num_ranks)
        self._deadline = deadline
        self._looked = 0.0
        self._stopped: str | None = None
        store = connect(self.host, self.port)
        self.announcement = self._announced(store, version, build)
        self.epoch = TransferEpoch(store, version, group_rank.epoch)
        self._propose(
            store, RendezvousPlan(epoch=group_rank.epoch, world_size=group_rank.world_size)
        )

    def join(self, held: str) -> GroupSetup:
        """Join; returns when all ranks have.

        Args:
            held: the group that these ranks are in from the version before, under the same ranks.
        """
        self.epoch.join(self.ranks, held)
        return self._wait(self.epoch.group_setup)

    def bucket(self, number: int) -> BucketHeader:
        """The n-th bucket, as soon as it can be broadcast."""
        return self._wait(lambda: self.epoch.bucket(number))

    def report_received(self) -> None:
        """Report that everything was received."""
        self.epoch.report_received(self.ranks)

    def leave(self, error: SyncError) -> SyncError:
        """End the epoch for everybody; return the reason, which may be an earlier one of another rank."""
        with suppress(SyncError):
            self.epoch.fail(error)
            return self.epoch.failure() or error
        return error

    def stop(self, reason: str) -> None:
        """End all waiting; from any thread. Means nothing to a member that has arrived."""
        self._stopped = reason

    def watch(self) -> None:
        """Raises:
        SyncError: the deadline has passed, the epoch is over, or the trainer is gone.
        """
        self._deadline.check()
        if self._stopped is not None:
            raise SyncError(self._stopped)
        if time.monotonic() - self._looked > LOOK_S:
            failure = self.epoch.failure()
            if failure is not None:
                raise failure
            self._looked = time.monotonic()

    def _wait(self, ask: Callable[[], T | None]) -> T:
        while (answer := ask()) is None:
            self.watch()
            self._deadline.pause()
        self._deadline.restart()
        return answer

    def _announced(self, store: Store, version: PolicyVersion, build: Build | None) -> Announcement:
        name = version_name(version)
        with asking():
            if not store.check([f"{name}/announcement"]):
                raise SyncError(f"there is no version {version} at {self.path}, or no longer")
            text = (
                store.get(f"{name}/requirements") if store.check([f"{name}/requirements"]) else None
            )
            announcement = parse(Announcement, store.get(f"{name}/announcement"))
        requirements = Requirements() if text is None else parse(Requirements, text)
        if requirements.build is not None and build is not None:
            check_same(requirements.build, build)
        if requirements.location is not None:
            check_reachable(requirements.location)
        return announcement

    def _propose(self, store: Store, plan: RendezvousPlan) -> None:
        wanted, seen = plan.model_dump_json(), ""
        while True:
            with asking():
                key = f"{version_name(self.epoch.version)}/plan"
                found = store.compare_set(key, seen, wanted).decode()
            if found == wanted:
                return
            other = parse(RendezvousPlan, found)
            if other.closed:
                raise SyncError(f"{self.path} {other.closed}")
            if other.epoch > plan.epoch:
                raise Fenced(
                    f"epoch {plan.epoch} of {self.path} was superseded by epoch {other.epoch}"
                )
            if other.epoch == plan.epoch:
                raise SyncError(
                    f"{self.path} is for {other.world_size} members in epoch {plan.epoch}, "
                    f"not for {plan.world_size}"
                )
            seen = found


def address_of(path: str) -> tuple[str, int]:
    """Host and port of `gloo://host:port/v00000007`.

    Raises:
        SyncError: it has none.
    """
    with suppress(ValueError):
        parts = urlsplit(path)
        if parts.hostname is not None and parts.port is not None:
            return parts.hostname, parts.port
    raise SyncError(f"{path} names no rendezvous; give {path.partition(':')[0]}://host:port/v...")
