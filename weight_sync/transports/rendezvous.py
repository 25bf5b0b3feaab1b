"""Rendezvous of a trainer and the servers that want a version, through one `TCPStore`.

The trainer hosts it. Keys of a version are below its name:

    announcement             what is published; set by the trainer, before any server knows of it
    requirements             of members, set before the announcement; others must not join
    plan                     who takes part; the proposal with the highest epoch, then "closed"
    <epoch>/rank/<rank>      the group that a member is still in from the version before
    <epoch>/group            the group that is used, once all ranks are taken
    <epoch>/bucket/<n>       the entries of the n-th bucket; after the last one, the digest
    <epoch>/received/<rank>  a member has received everything
    <epoch>/failed           why this epoch is over; set by any member, the first reason counts

An epoch is all or nothing: what ends it for one ends it for all, and a newer plan ends it, too. The
plan is only ever exchanged by compare-and-set, so the trainer closes exactly the plan it has served.

Nothing here waits inside the store, where waiting cannot be interrupted. But a store whose trainer was
stopped does not respond: call this on a thread that may be left behind (`detached`).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from headway.contracts.config.base import Config
from headway.contracts.errors import Fenced, SyncError
from headway.contracts.types import PolicyVersion
from weight_sync.manifest import Digest, TensorEntry
from weight_sync.store import Announcement, version_name
from weight_sync.transports.daemon_calls import held_at_exit
from weight_sync.transports.handles import MemoryLocation
from weight_sync.transports.nccl import Build
from weight_sync.transports.process_group import GroupBackend

CONNECT_S = 5.0
LOOKUP_S = 10.0
"""Seconds more for a new connection: torch asks DNS for the name of the other end and waits for it.
A query that is lost takes 5 s, and there are two.
"""
LOOK_S = 0.02
"""Seconds after which a busy thread checks again whether the epoch is over."""

M = TypeVar("M", bound=BaseModel)


class RendezvousPlan(Config):
    """Participants of the transfer of a version."""

    epoch: int
    world_size: int
    """Number of ranks, the trainer's rank 0 included."""
    closed: str = ""
    """Why it is closed; empty while members can join."""


class Requirements(Config):
    """Requirements that the transport makes of participants."""

    build: Build | None = None
    """The trainer's NCCL: only equal ones work together."""
    location: MemoryLocation | None = None
    """Location of the trainer's memory: handles do not reach any further."""


class GroupSetup(Config):
    """The group of an epoch."""

    group: str
    is_new: bool
    """False: every member is still in it, with the same rank."""
    backend: GroupBackend
    timeout_s: float
    """Seconds for the members to join, and for every broadcast."""


class BucketHeader(Config):
    """One bucket, or the end."""

    entries: tuple[TensorEntry, ...] = ()
    size: int = Field(0, ge=0)
    """Bytes of the broadcast; entries are at their offsets in it."""
    digest: Digest | None = None
    """Digest of the version, in the header that ends the buckets."""


class _Failure(Config):
    reason: str
    is_fenced: bool


class TransferEpoch:
    """One epoch of one version, as both ends see it."""

    def __init__(self, store: Store, version: PolicyVersion, epoch: int) -> None:
        self.version = version
        self.epoch = epoch
        self._store = PrefixStore(f"{version_name(version)}/{epoch}", store)
        self._num_buckets = 0
        self._num_ranks = 0

    def join(self, ranks: Sequence[int], held: str) -> None:
        """Join with these ranks; `held` names the group that all of them are still in."""
        with asking():
            for rank in ranks:
                self._store.set(f"rank/{rank}", held)

    def held_groups(self, world_size: int) -> list[str] | None:
        """Return the group that each rank but 0 is still in, once all have joined; else None."""
        self._num_ranks = world_size
        keys = [f"rank/{rank}" for rank in range(1, world_size)]
        with asking():
            if not self._store.check(keys):
                return None
            return [self._store.get(key).decode() for key in keys]

    def announce_group(self, group_setup: GroupSetup) -> None:
        with asking():
            self._store.set("group", group_setup.model_dump_json())

    def group_setup(self) -> GroupSetup | None:
        text = self._text("group")
        return None if text is None else parse(GroupSetup, text)

    def add_bucket(self, header: BucketHeader) -> None:
        with asking():
            self._store.set(f"bucket/{self._num_buckets}", header.model_dump_json())
        self._num_buckets += 1

    def bucket(self, number: int) -> BucketHeader | None:
        text = self._text(f"bucket/{number}")
        return None if text is None else parse(BucketHeader, text)

    def has_bucket(self, number: int) -> bool:
        with asking():
            return self._store.check([f"bucket/{number}"])

    def report_received(self, ranks: Sequence[int]) -> None:
        with asking():
            for rank in ranks:
                self._store.set(f"received/{rank}", "")

    def all_received(self, world_size: int) -> bool:
        """True if every rank has received everything."""
        with asking():
            return self._store.check([f"received/{rank}" for rank in range(1, world_size)])

    def fail(self, error: SyncError) -> None:
        """End it for everybody."""
        failure = _Failure(reason=error.message, is_fenced=isinstance(error, Fenced))
        with asking():
            self._store.compare_set("failed", "", failure.model_dump_json())

    def failure(self) -> SyncError | None:
        """Why a member has ended it."""
        text = self._text("failed")
        if text is None:
            return None
        failure = parse(_Failure, text)
        return (Fenced if failure.is_fenced else SyncError)(failure.reason)

    def forget(self) -> None:
        """Delete the keys that are not read any more; the reason of a failure stays."""
        keys = [f"bucket/{number}" for number in range(self._num_buckets)]
        for rank in range(1, self._num_ranks):
            keys += [f"rank/{rank}", f"received/{rank}"]
        with asking():
            for key in ("group", *keys):
                self._store.delete_key(key)

    def _text(self, key: str) -> bytes | None:
        with asking():
            return self._store.get(key) if self._store.check([key]) else None


class RendezvousStore:
    """The trainer's end: the store itself."""

    def __init__(self, host: str, port: int) -> None:
        listening = _listen(host, port)
        bound: int = listening.getsockname()[1]
        with asking():
            self._store = _open(host, bound, is_master=True, master_listen_fd=listening.detach())
        self._announced: str | None = None
        self._epochs: list[TransferEpoch] = []
        self.host = host
        self.port = bound

    def announce(
        self, announcement: Announcement, requirements: Requirements | None = None
    ) -> None:
        """Let receivers come for a version; the one before is over.

        Args:
            needs: what they must have; None over Gloo.
        """
        name = version_name(announcement.version)
        with asking():
            if self._announced is not None:
                over = RendezvousPlan(
                    epoch=0, world_size=1, closed=f"is over, {name} is being published"
                )
                self._store.set(f"{self._announced}/plan", over.model_dump_json())
                self._store.delete_key(f"{self._announced}/announcement")
                self._store.delete_key(f"{self._announced}/requirements")
            self._store.delete_key(f"{name}/plan")  # of an attempt before this one
            if requirements is not None:
                self._store.set(f"{name}/requirements", requirements.model_dump_json())
            self._store.set(f"{name}/announcement", announcement.model_dump_json())
        self._announced = name
        while self._epochs:
            self._epochs.pop().forget()

    def plan(self, version: PolicyVersion) -> RendezvousPlan | None:
        """The newest proposal."""
        key = f"{version_name(version)}/plan"
        with asking():
            if not self._store.check([key]):
                return None
            return parse(RendezvousPlan, self._store.get(key))

    def begin_epoch(self, version: PolicyVersion, plan: RendezvousPlan) -> TransferEpoch:
        self._epochs.append(TransferEpoch(self._store, version, plan.epoch))
        return self._epochs[-1]

    def close_plan(self, version: PolicyVersion, plan: RendezvousPlan | None, reason: str) -> bool:
        """Close the plan, so that no one can join; false if there is a newer one."""
        seen = "" if plan is None else plan.model_dump_json()
        closed = (plan or RendezvousPlan(epoch=-1, world_size=1)).model_copy(
            update={"closed": reason}
        )
        wanted = closed.model_dump_json()
        with asking():
            found = self._store.compare_set(f"{version_name(version)}/plan", seen, wanted)
        return found.decode() == wanted

    def connect(self) -> Store:
        """Open another connection, to block on."""
        return connect(self.host, self.port)

    def close(self) -> None:
        """Close the rendezvous; its port is free once no epoch is held any more."""
        self._epochs = []
        if self._announced is not None:
            over = RendezvousPlan(epoch=0, world_size=1, closed="is over, its trainer has gone")
            with asking():
                self._store.set(f"{self._announced}/plan", over.model_dump_json())
        del self._store


def connect(host: str, port: int) -> Store:
    """A connection to a trainer's store.

    Raises:
        SyncError: it cannot be reached.
    """
    try:
        # Torch would try for as long as its time-out lasts.
        socket.create_connection((host, port), CONNECT_S).close()
        with held_at_exit():
            return _open(host, port, is_master=False)
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise SyncError(f"there is no trainer at {host}:{port}: {reason}") from error


@contextmanager
def asking() -> Iterator[None]:
    """Turn the store's errors into ours.

    Raises:
        SyncError: the trainer's store does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise SyncError(f"the trainer's rendezvous is gone: {reason}") from error


def parse(kind: type[M], text: bytes | str) -> M:
    """Read a record of the store.

    Raises:
        SyncError: it is none of this kind.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]["msg"]
        raise SyncError(f"the rendezvous holds no {kind.__name__.strip('_')}: {first}") from error


def _open(host: str, port: int, **options: Any) -> TCPStore:
    limit = timedelta(seconds=CONNECT_S + LOOKUP_S)
    store = TCPStore(host, port, timeout=limit, wait_for_workers=False, **options)
    store.set_timeout(timedelta(seconds=CONNECT_S))
    return store


def _listen(host: str, port: int) -> socket.socket:
    """Listen on this address only if it is this machine's; otherwise it is the name by which others
    reach us.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if not isinstance(error, socket.gaierror) and error.errno != errno.EADDRNOTAVAIL:
            raise SyncError(f"cannot listen at {host}:{port}: {error}") from error
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise SyncError(f"cannot listen at port {port}: {error}") from error
