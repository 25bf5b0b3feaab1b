"""Groups of real processes, and of Ray's actors: calls, futures, and deaths in between."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.numeric.ranks  # noqa: F401 -- what the fork server imports once
from headway.contracts.errors import ConfigError, DataError, WorkerError, WorkerLost
from tests.integration.group_workers import Known, negated
from tests.processes import FORKS
from tests.ray_cluster import ray_cluster, shut_down
from trainer.workers.data_proto import DataProto
from trainer.workers.dispatch import Dispatch, register
from trainer.workers.group import WorkerGroup
from trainer.workers.worker import Worker

DEADLINE_S = 90.0
ROOT = Path(__file__).parents[2]
KINDS = ("processes", "ray")

pytestmark = pytest.mark.extended
Open = Callable[..., WorkerGroup]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster():
        yield


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Starts groups of a kind, and closes them."""
    groups: list[WorkerGroup] = []

    def start(kind: str, world_size: int, *args: Any, **options: Any) -> WorkerGroup:
        options = {"timeout_s": DEADLINE_S} | options
        if kind == "ray":
            request.getfixturevalue("cluster")
            group = WorkerGroup.of_ray_actors(Known, world_size, *args, **options)
        else:
            options["start_method"] = FORKS.get_start_method()
            group = WorkerGroup.of_processes(Known, world_size, *args, **options)
        groups.append(group)
        return group

    yield start
    for group in groups:
        group.close()


def rows(size: int) -> DataProto:
    return DataProto.of(x=torch.arange(size))


def priority_of(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def pidfds(pids: list[int]) -> list[int]:
    return [os.pidfd_open(pid) for pid in pids]


def assert_gone(descriptors: list[int]) -> None:
    """All of these processes end, within a deadline."""
    for descriptor in descriptors:
        ready, _, _ = select.select([descriptor], [], [], DEADLINE_S)
        os.close(descriptor)
        assert ready, "a worker outlived its group"


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_every_mode(kind, opened):
    group = opened(kind, 2)
    assert group.pid() == list(group.pids)
    assert os.getpid() not in group.pids
    # Ray's default would leave them the time that nobody else wants.
    assert {priority_of(pid) for pid in group.pids} == {priority_of(os.getpid())}
    assert group.rank() == 0
    scaled = group.scale(rows(3), factors=rows(3))
    assert scaled["x"].tolist() == [0, 1, 4]
    assert scaled["rank"].tolist() == [0, 0, 1]
    assert group.apply(negated, rows(3))["x"].tolist() == [0, -1, -2]
    assert group.sum_of_ranks() == [1.0, 1.0]
    # A future is an argument like any other; calls run in the order in which they were made.
    later = group.scale_later(rows(5))
    assert group.scale(later, factors=rows(5))["x"].tolist() == [0, 10, 40, 90, 160]
    assert later.result()["x"].tolist() == [0, 10, 20, 30, 40]
    with pytest.raises(AttributeError, match="no method 'place_in_mesh' is registered"):
        group.place_in_mesh("pairs", None)


def test_peers_of_a_mesh_get_the_same_rows(opened):
    group = opened("processes", 4)
    seen = group.seen_by(rows(5))
    assert seen["x"].tolist() == [0, 1, 2, 3, 4]
    assert seen["rank"].tolist() == [0, 0, 0, 2, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_worker_raises_is_raised_here_and_the_group_goes_on(kind, opened):
    group = opened(kind, 2)
    with pytest.raises(DataError, match="a bad row") as caught:
        group.fail(1, "service")
    assert "raised by worker 1 in fail" in caught.value.__notes__[0]
    with pytest.raises(WorkerError, match="ValueError: a bad value"):
        group.fail(0, "value")
    with pytest.raises(WorkerError):
        group.unfit()
    assert group.rank() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_raises_alone_ends_those_who_wait_for_it(kind, opened):
    group = opened(kind, 2, grace_s=1.0)
    workers = pidfds(group.pids)
    with pytest.raises(WorkerError, match="a bad value"):
        group.fail(1, "alone")
    assert_gone(workers)
    with pytest.raises(WorkerLost, match="start another one"):
        group.rank()


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_ends_the_call_and_the_group(kind, opened):
    group = opened(kind, 2)
    workers = pidfds(group.pids)
    victim = group.pids[1]
    group.sum_of_ranks()
    killer = threading.Timer(0.1, os.kill, (victim, signal.SIGKILL))
    killer.start()
    with pytest.raises(WorkerLost, match="start another group"):
        group.wait_for_all(but=1)
    killer.join()
    assert_gone(workers)
    with pytest.raises(WorkerLost, match="start another one"):
        group.rank()


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_does_not_answer_ends_the_call_at_its_deadline(kind, opened):
    group = opened(kind, 2, timeout_s=10.0)
    workers = pidfds(group.pids)
    with pytest.raises(WorkerLost, match="worker 0, 1 did not answer wait_for_all within 10 s"):
        group.wait_for_all(but=1)
    assert_gone(workers)


def test_one_that_is_stopped_ends_a_call_that_does_not_fit_into_its_pipe(opened):
    group = opened("processes", 2, timeout_s=5.0)
    workers = pidfds(group.pids)
    os.kill(group.pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerLost, match="did not answer scale within 5 s"):
        group.scale(DataProto.of(x=torch.zeros(1 << 20)))
    assert_gone(workers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_cannot_be_built_says_why(kind, opened):
    with pytest.raises(DataError, match="rank 1 is refused"):
        opened(kind, 2, 1)


def test_no_worker_outlives_a_killed_driver():
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.group_workers"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        workers = pidfds(pids)
        driver.kill()
        driver.wait(DEADLINE_S)
        assert_gone(workers)
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()


def test_a_group_ends_its_workers_when_it_is_closed(opened):
    group = opened("processes", 2)
    workers = pidfds(group.pids)
    group.close()
    assert_gone(workers)
    group.close()


def test_a_method_called_like_the_group_s_own_is_refused():
    class Clash(Worker):
        @register(Dispatch.ONE_TO_ALL)
        def pids(self) -> None:
            """Nothing."""

    with pytest.raises(ConfigError, match="Clash registers pids"):
        WorkerGroup(Clash, None)


def test_ray_s_actors_want_a_cluster():
    shut_down()
    with pytest.raises(ConfigError, match=r"call ray\.init"):
        WorkerGroup.of_ray_actors(Known, 1)


def test_ranks_of_several_groups_get_gpus_of_their_own(opened: Open) -> None:
    actor = opened("processes", 2, devices=["0", "1"])
    critic = opened("processes", 1, devices=["GPU-2f"])
    assert actor.visible_devices() == ["0", "1"]
    assert critic.visible_devices() == ["GPU-2f"]
    with pytest.raises(ConfigError, match="1 devices for 2 ranks; name one for each"):
        opened("processes", 2, devices=["0"])
