"""How a trainer and the servers that want a version find each other, through one `TCPStore`.

The trainer hosts it. Keys of a version are below its name:

    announcement            what is published; the trainer, before anybody is told
    plan                    who takes part; the proposal with the highest epoch, then "closed"
    <epoch>/seat/<rank>     the group that a member is still in from the version before
    <epoch>/meeting         once all seats are taken: the group that is used
    <epoch>/part/<n>        the entries of the n-th bucket; after the last one, the digest
    <epoch>/arrived/<rank>  a member has it all
    <epoch>/failed          why this epoch is over; any member, the first reason counts

An epoch is all or nothing: what ends it for one ends it for all, and a newer plan ends it, too. The
plan is only ever exchanged by compare-and-set, so the trainer closes exactly the plan it has served.

Nothing here waits inside of the store, where waiting cannot be ended. But a store whose trainer was
stopped answers nothing: call this on a thread that may be left behind (`detached`).
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from headway.contracts.config.base import Config
from headway.contracts.errors import Fenced, SyncError
from headway.contracts.types import GroupSeat, PolicyVersion
from weight_sync.manifest import Digest, TensorEntry
from weight_sync.patience import Patience
from weight_sync.store import Announcement, version_name
from weight_sync.transports.process_group import GroupBackend

CONNECT_S = 5.0
LOOK_S = 0.02
"""How often somebody who is busy looks whether the epoch is over."""

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Plan(Config):
    """Who takes part in bringing a version."""

    epoch: int
    world_size: int
    """With the trainer, rank 0."""
    closed: str = ""
    """Why nobody can join any more."""


class Meeting(Config):
    """The group of an epoch."""

    group: str
    is_new: bool
    """False: every member is still in it, with the same rank."""
    backend: GroupBackend
    timeout_s: float
    """For the members to meet, and for every broadcast."""


class Part(Config):
    """One bucket, or the end."""

    entries: tuple[TensorEntry, ...] = ()
    size: int = Field(0, ge=0)
    """Bytes of the broadcast; entries lie at their offsets in it."""
    digest: Digest | None = None
    """Of the version; this is no bucket, all have come."""


class _Failure(Config):
    reason: str
    is_fenced: bool


class Round:
    """One epoch of one version, as both ends see it."""

    def __init__(self, store: Store, version: PolicyVersion, epoch: int) -> None:
        self.version = version
        self.epoch = epoch
        self._store = PrefixStore(f"{version_name(version)}/{epoch}", store)
        self._num_parts = 0
        self._num_seats = 0

    def sit(self, ranks: Sequence[int], held: str) -> None:
        """Take seats; `held` names the group that all of them are still in."""
        with _asking():
            for rank in ranks:
                self._store.set(f"seat/{rank}", held)

    def seats(self, world_size: int) -> list[str] | None:
        """What everybody but rank 0 holds, once all sit."""
        self._num_seats = world_size
        keys = [f"seat/{rank}" for rank in range(1, world_size)]
        with _asking():
            if not self._store.check(keys):
                return None
            return [self._store.get(key).decode() for key in keys]

    def meet(self, meeting: Meeting) -> None:
        with _asking():
            self._store.set("meeting", meeting.model_dump_json())

    def meeting(self) -> Meeting | None:
        text = self._text("meeting")
        return None if text is None else _parse(Meeting, text)

    def add_part(self, part: Part) -> None:
        with _asking():
            self._store.set(f"part/{self._num_parts}", part.model_dump_json())
        self._num_parts += 1

    def part(self, number: int) -> Part | None:
        text = self._text(f"part/{number}")
        return None if text is None else _parse(Part, text)

    def has_part(self, number: int) -> bool:
        with _asking():
            return self._store.check([f"part/{number}"])

    def arrive(self, ranks: Sequence[int]) -> None:
        with _asking():
            for rank in ranks:
                self._store.set(f"arrived/{rank}", "")

    def have_arrived(self, world_size: int) -> bool:
        """Whether everybody has it all."""
        with _asking():
            return self._store.check([f"arrived/{rank}" for rank in range(1, world_size)])

    def fail(self, error: SyncError) -> None:
        """End it for everybody."""
        failure = _Failure(reason=error.message, is_fenced=isinstance(error, Fenced))
        with _asking():
            self._store.compare_set("failed", "", failure.model_dump_json())

    def failure(self) -> SyncError | None:
        """Why a member has ended it."""
        text = self._text("failed")
        if text is None:
            return None
        failure = _parse(_Failure, text)
        return (Fenced if failure.is_fenced else SyncError)(failure.reason)

    def forget(self) -> None:
        """Delete what nobody will read; why it failed may still be asked."""
        keys = [f"part/{number}" for number in range(self._num_parts)]
        for rank in range(1, self._num_seats):
            keys += [f"seat/{rank}", f"arrived/{rank}"]
        with _asking():
            for key in ("meeting", *keys):
                self._store.delete_key(key)

    def _text(self, key: str) -> bytes | None:
        with _asking():
            return self._store.get(key) if self._store.check([key]) else None


class Host:
    """The trainer's end: the store itself."""

    def __init__(self, host: str, port: int) -> None:
        listening = _listen(host, port)
        bound: int = listening.getsockname()[1]
        with _asking():
            self._store = TCPStore(
                host,
                bound,
                is_master=True,
                timeout=timedelta(seconds=CONNECT_S),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        self._announced: str | None = None
        self._rounds: list[Round] = []
        self.host = host
        self.port = bound

    def announce(self, announcement: Announcement) -> None:
        """Let receivers come for a version; the one before is over."""
        name = version_name(announcement.version)
        with _asking():
            if self._announced is not None:
                over = Plan(epoch=0, world_size=1, closed=f"is over, {name} is being published")
                self._store.set(f"{self._announced}/plan", over.model_dump_json())
                self._store.delete_key(f"{self._announced}/announcement")
            self._store.delete_key(f"{name}/plan")  # of an attempt before this one
            self._store.set(f"{name}/announcement", announcement.model_dump_json())
        self._announced = name
        while self._rounds:
            self._rounds.pop().forget()

    def plan(self, version: PolicyVersion) -> Plan | None:
        """The newest proposal."""
        key = f"{version_name(version)}/plan"
        with _asking():
            if not self._store.check([key]):
                return None
            return _parse(Plan, self._store.get(key))

    def round(self, version: PolicyVersion, plan: Plan) -> Round:
        self._rounds.append(Round(self._store, version, plan.epoch))
        return self._rounds[-1]

    def close_plan(self, version: PolicyVersion, plan: Plan | None, reason: str) -> bool:
        """Let nobody join any more; false if there is a newer plan than this one."""
        seen = "" if plan is None else plan.model_dump_json()
        closed = (plan or Plan(epoch=-1, world_size=1)).model_copy(update={"closed": reason})
        wanted = closed.model_dump_json()
        with _asking():
            found = self._store.compare_set(f"{version_name(version)}/plan", seen, wanted)
        return found.decode() == wanted

    def connect(self) -> Store:
        """Another connection, to block on."""
        return connect(self.host, self.port)

    def close(self) -> None:
        """Nobody comes any more; the port is free once nobody holds a round."""
        self._rounds = []
        if self._announced is not None:
            over = Plan(epoch=0, world_size=1, closed="is over, its trainer has gone")
            with _asking():
                self._store.set(f"{self._announced}/plan", over.model_dump_json())
        del self._store


class Member:
    """One server's part in bringing a version; it may speak for several ranks of its engine.

    A server whose engine's processes are the ranks takes seats for them, lets them join the `Meeting`'s
    group (SGLang's `init_weights_update_group`, at this address), and has them take part in one
    broadcast for every `part` that is no end.
    """

    def __init__(
        self,
        path: str,
        version: PolicyVersion,
        seat: GroupSeat,
        patience: Patience,
        num_ranks: int = 1,
    ) -> None:
        """Take part in the version at `path`, `<backend>://host:port/v00000007`.

        Raises:
            SyncError: nobody is there, no such version is announced any more, or it went to others.
            Fenced: a newer epoch takes part in it.
        """
        self.path = path
        self.host, self.port = address_of(path)
        self.ranks = range(seat.rank, seat.rank + num_ranks)
        self._patience = patience
        self._looked = 0.0
        self._stopped: str | None = None
        store = connect(self.host, self.port)
        self.announcement = self._announced(store, version)
        self._round = Round(store, version, seat.epoch)
        self._propose(store, Plan(epoch=seat.epoch, world_size=seat.world_size))

    def meet(self, held: str) -> Meeting:
        """Sit down; returns when everybody has.

        Args:
            held: the group that these ranks are in from the version before, with the same seats.
        """
        self._round.sit(self.ranks, held)
        return self._wait(self._round.meeting)

    def part(self, number: int) -> Part:
        """The n-th bucket, as soon as it can be broadcast."""
        return self._wait(lambda: self._round.part(number))

    def has_part(self, number: int) -> bool:
        """Whether that one is known already."""
        return self._round.has_part(number)

    def arrive(self) -> None:
        """Say that everything has come."""
        self._round.arrive(self.ranks)

    def leave(self, error: SyncError) -> SyncError:
        """End the epoch for everybody; returns why it ended, which somebody may have said before."""
        with suppress(SyncError):
            self._round.fail(error)
            return self._round.failure() or error
        return error

    def stop(self, reason: str) -> None:
        """End all waiting; from any thread. Means nothing to a member that has arrived."""
        self._stopped = reason

    def watch(self) -> None:
        """Raises:
        SyncError: patience has ended, the epoch is over, or the trainer is gone.
        """
        _ = self._patience.left_s
        if self._stopped is not None:
            raise SyncError(self._stopped)
        if time.monotonic() - self._looked > LOOK_S:
            failure = self._round.failure()
            if failure is not None:
                raise failure
            self._looked = time.monotonic()

    def _wait(self, ask: Callable[[], T | None]) -> T:
        while (answer := ask()) is None:
            self.watch()
            self._patience.pause()
        self._patience.progress()
        return answer

    def _announced(self, store: Store, version: PolicyVersion) -> Announcement:
        key = f"{version_name(version)}/announcement"
        with _asking():
            if not store.check([key]):
                raise SyncError(f"there is no version {version} at {self.path}, or no longer")
            return _parse(Announcement, store.get(key))

    def _propose(self, store: Store, plan: Plan) -> None:
        wanted, seen = plan.model_dump_json(), ""
        while True:
            with _asking():
                key = f"{version_name(self._round.version)}/plan"
                found = store.compare_set(key, seen, wanted).decode()
            if found == wanted:
                return
            other = _parse(Plan, found)
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


def connect(host: str, port: int) -> Store:
    """A connection to a trainer's store.

    Raises:
        SyncError: nobody is there.
    """
    try:
        # Torch would try for as long as its time-out lasts.
        socket.create_connection((host, port), CONNECT_S).close()
        limit = timedelta(seconds=CONNECT_S)
        return TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise SyncError(f"there is no trainer at {host}:{port}: {reason}") from error


@contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise SyncError(f"the trainer's rendezvous is gone: {reason}") from error


def _parse(kind: type[M], text: bytes | str) -> M:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]["msg"]
        raise SyncError(f"the rendezvous holds no {kind.__name__.strip('_')}: {first}") from error


def _listen(host: str, port: int) -> socket.socket:
    """On this address only if it is this machine's; otherwise it is what others call us by."""
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
