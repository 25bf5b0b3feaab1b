"""What NCCL does on errors and while it meets, on doubles of torch's group: it needs no GPU."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headway.contracts.errors import SyncError
from headway.contracts.types import GroupRank
from tests.unit.weight_sync.collective_child import LIMIT_S
from weight_sync.deadline import Deadline
from weight_sync.store import Announcement
from weight_sync.transports.nccl import Build, build_of, check_same, own_build
from weight_sync.transports.participant import Participant
from weight_sync.transports.process_group import GroupAddress, WeightGroup, make_group
from weight_sync.transports.rendezvous import RendezvousStore, Requirements

MODES = ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
INIT_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
ADDRESS = GroupAddress("g", "127.0.0.1", 1, 0, 2, "nccl")
OURS, THEIRS = Build(nccl="2.29.7", torch="2.13.0"), Build(nccl="2.28.9", torch="2.11.0")


class Work:
    """Of NCCL: completed also with an exception, of which `wait` says nothing."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return self._failure

    def wait(self) -> bool:
        return True


class Group:
    """Of NCCL, as torch binds it; remembers how it was made."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=-1)

    made: list[Group]

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.options = options
        self.modes = [os.environ.get(name) for name in MODES]
        self.work = Work()
        self.aborted = threading.Event()
        self.meets = threading.Event()
        """Until then a broadcast waits for the others."""
        self.meets.set()
        self.may_abort = threading.Event()
        self.may_abort.set()
        Group.made.append(self)

    def _set_sequence_number_for_group(self) -> None: ...

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        assert self.meets.wait(LIMIT_S)
        if self.aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted")
        return self.work

    def abort(self) -> None:
        assert self.may_abort.wait(LIMIT_S)
        self.aborted.set()
        self.meets.set()


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Group.made = []
    for name in (*MODES, INIT_TIMEOUT, "TORCH_NCCL_USE_COMM_NONBLOCKING"):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever the code leaves
        monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield


def joined(timeout_s: float = 30.0) -> tuple[WeightGroup, Group]:
    group = make_group(ADDRESS, dist.HashStore(), timeout_s, torch.device("cpu"))
    return group, Group.made[-1]


def go_on() -> None: ...


def give_up() -> None:
    raise SyncError("nobody waits for it")


def test_an_error_in_this_group_ends_no_process_and_other_groups_keep_their_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(MODES[1], "3")
    _, group = joined()
    assert group.modes == ["1", "0"]  # no watchdog, and nothing that it would do
    assert [os.environ.get(name) for name in MODES] == [None, "3"]


def test_a_communicator_is_made_without_blocking_and_not_waited_for_longer_than_the_group() -> None:
    _, group = joined(timeout_s=2.5)
    assert group.options.config.blocking == 0
    assert os.environ[INIT_TIMEOUT] == "3"


def test_the_time_that_somebody_else_set_for_communicators_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(INIT_TIMEOUT, "77")
    joined()
    assert os.environ[INIT_TIMEOUT] == "77"
    monkeypatch.delenv(INIT_TIMEOUT)
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
    joined()
    assert INIT_TIMEOUT not in os.environ


def test_a_broadcast_that_is_completed_with_an_error_has_failed() -> None:
    group, double = joined()
    double.work = Work(dist.DistBackendError("NCCL error: remote process exited"))
    group.begin_sending(torch.zeros(4, dtype=torch.uint8), go_on)
    with pytest.raises(SyncError, match="remote process exited"):
        group.finish(go_on)


def test_what_is_aborted_while_it_is_polled_has_not_come() -> None:
    group, _ = joined()
    filled = torch.full((4,), 7, dtype=torch.uint8)
    group.begin_receiving(filled, go_on)
    group._group = None  # as `close` leaves it; the aborted broadcast is completed without an error
    with pytest.raises(SyncError, match="was closed"):
        group.finish(go_on)


def test_whoever_waits_for_others_to_meet_is_freed_by_an_abort() -> None:
    group, double = joined()
    double.meets.clear()
    with pytest.raises(SyncError, match="nobody waits"):
        group.begin_sending(torch.zeros(4, dtype=torch.uint8), give_up)
    group.close()
    assert double.aborted.wait(LIMIT_S)


def test_closing_does_not_wait_for_an_abort() -> None:
    group, double = joined()
    double.may_abort.clear()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(group.close).result(LIMIT_S / 2)
        assert not double.aborted.is_set()
        double.may_abort.set()
    assert double.aborted.wait(LIMIT_S)


@pytest.fixture
def host() -> Iterator[RendezvousStore]:
    made = RendezvousStore("127.0.0.1", 0)
    yield made
    made.close()


def member(host: RendezvousStore, build: Build | None) -> Participant:
    path = f"nccl://127.0.0.1:{host.port}/v00000007"
    return Participant(path, 7, GroupRank(1, 1, 2), Deadline(LIMIT_S), build=build)


def test_two_versions_of_nccl_at_one_rendezvous_are_refused_by_name(host: RendezvousStore) -> None:
    host.announce(Announcement(version=7), Requirements(build=OURS))
    with pytest.raises(SyncError, match=r"NCCL 2\.29\.7 \(torch 2\.13\.0\).*NCCL 2\.28\.9"):
        member(host, THEIRS)
    assert host.plan(7) is None  # it took no part, so the others can do without
    member(host, OURS.model_copy(update={"torch": "2.13.1"}))  # the NCCL counts
    assert host.plan(7) is not None


def test_whose_version_is_not_known_is_not_refused(host: RendezvousStore) -> None:
    host.announce(Announcement(version=7), Requirements(build=OURS))
    member(host, None)
    host.announce(Announcement(version=8))
    with pytest.raises(SyncError, match="no version 7"):
        member(host, THEIRS)


def test_another_python_is_asked_for_its_version() -> None:
    assert build_of(sys.executable) == own_build()
    with pytest.raises(SyncError, match="cannot ask /nowhere/python"):
        build_of("/nowhere/python")
    with pytest.raises(SyncError, match="NCCL none"):
        check_same(OURS, Build(nccl="", torch="2.13.0+cpu"))
