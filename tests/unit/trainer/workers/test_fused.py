"""Several workers in one process, and pools of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from headway.contracts.config.ppo_hybrid import ResourcePoolConfig
from headway.contracts.errors import ConfigError
from trainer.workers.dispatch import Dispatch, WorkerCall, register
from trainer.workers.fused import FusedWorker, fused_groups
from trainer.workers.resource_pools import pool_devices
from trainer.workers.worker import Worker, WorkerHost, WorkerReply, WorkerSpec


class Named(Worker):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    @register(Dispatch.ONE_TO_ALL)
    def name(self) -> str:
        return self._name

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def greet(self, who: str) -> str:
        return f"{self._name} greets {who}"


class InProcess:
    """`WorkerExecutor` with one worker, in this process."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._host = WorkerHost(spec, {})
        self.is_closed = False

    world_size = 1
    pids: Sequence[int] = (0,)

    def run(self, method: str, calls: Mapping[int, WorkerCall]) -> dict[int, WorkerReply]:
        return {rank: self._host.answer(method, call) for rank, call in calls.items()}

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def opened():
    specs = {name: WorkerSpec(Named, (name,)) for name in ("actor", "critic")}
    executor = InProcess(WorkerSpec(FusedWorker, (specs,)))
    groups = fused_groups(executor, specs)
    yield executor, groups
    for group in groups.values():
        group.close()


def test_each_worker_of_a_process_has_a_group_of_its_own(opened):
    _, groups = opened
    assert {name: group.name() for name, group in groups.items()} == {
        "actor": ["actor"],
        "critic": ["critic"],
    }


def test_the_last_group_ends_the_processes(opened):
    executor, groups = opened
    groups["actor"].close()
    assert not executor.is_closed
    assert groups["critic"].name() == ["critic"]
    groups["critic"].close()
    assert executor.is_closed


def test_a_direct_method_is_called_on_one_worker(opened):
    group = opened[1]["actor"]
    with pytest.raises(ConfigError, match=r"use group\.worker\(rank\)"):
        group.greet("you")
    assert group.worker(0).greet("you") == "actor greets you"
    with pytest.raises(ConfigError, match="rank 1 is none of a group of 1"):
        group.worker(1)
    with pytest.raises(AttributeError, match="no method 'wave' is registered"):
        group.worker(0).wave()


def test_a_call_can_be_waited_for_later(opened):
    assert opened[1]["actor"].submit("name").result() == ["actor"]


def test_pools_take_gpus_one_after_another():
    pools = {"a": ResourcePoolConfig(num_workers=2), "b": ResourcePoolConfig()}
    assert pool_devices(pools, []) == {"a": None, "b": None}
    assert pool_devices(pools, ["3", "5", "7"]) == {"a": ("3", "5"), "b": ("7",)}
    with pytest.raises(ConfigError, match="pool b wants 1 GPUs, and of 2 only 0 are left"):
        pool_devices(pools, ["0", "1"])
    shared = {"a": pools["b"], "b": ResourcePoolConfig(devices=("0",))}
    assert pool_devices(shared, ["0"]) == {"a": ("0",), "b": ("0",)}
