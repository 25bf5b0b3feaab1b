"""Roles on resource pools: a pool is a set of processes, and roles in one pool share them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from headway.contracts.config.ppo_hybrid import (
    PPOHybridExperiment,
    ResourcePoolConfig,
    WorkerGroupsConfig,
    WorkerRole,
)
from headway.contracts.errors import ConfigError
from headway.runtime.gpus import VISIBLE
from trainer.workers.executor import WorkerExecutor
from trainer.workers.fused import FusedWorker, fused_groups
from trainer.workers.group import WorkerGroup
from trainer.workers.processes import ProcessExecutor
from trainer.workers.reward_worker import RewardWorker
from trainer.workers.roles import ActorRolloutRefWorker, CriticWorker
from trainer.workers.worker import WorkerSpec

PRELOADED = ["trainer.workers.roles", "trainer.workers.reward_worker", "trainer.workers.fused"]
"""Modules that worker processes are forked with."""
PoolLauncher = Callable[[str, WorkerSpec], WorkerExecutor]
"""`(name of a pool, its worker) -> its started workers`."""


@dataclass(frozen=True, slots=True)
class RoleGroups:
    """The group of each role."""

    actor_rollout: WorkerGroup
    reward: WorkerGroup
    ref: WorkerGroup | None
    """That of `actor_rollout` where one worker has both roles; None without a reference."""
    critic: WorkerGroup | None
    pools: Mapping[str, WorkerGroup]
    """One group of each pool: its workers run in all processes of the pool."""

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        """Groups of the models that learn, by the name in checkpoints."""
        critics = {} if self.critic is None else {"critic": self.critic}
        return {"actor": self.actor_rollout, **critics}

    def init_models(self) -> None:
        """Load all models, one pool beside another."""
        groups = [self.actor_rollout, self.reward, self.critic]
        if self.ref is not self.actor_rollout:
            groups.append(self.ref)
        for future in [group.submit("init_model") for group in groups if group is not None]:
            future.result()


def open_groups(
    config: PPOHybridExperiment, stack: ExitStack, launcher: PoolLauncher | None = None
) -> RoleGroups:
    """Start the workers of all roles.

    Args:
        stack: ends them.
        launcher: what starts a pool; None is as configured.
    Raises:
        ConfigError: Ray is not installed, or there are too few GPUs.
        WorkerLost: a worker was not built in time.
    """
    placed = config.workers
    by_pool: dict[str, dict[str, WorkerSpec]] = {}
    for role, spec in _specs(config).items():
        by_pool.setdefault(placed.pool_of(role), {})[role] = spec
    start = launcher or _launcher(config, stack)
    groups: dict[str, WorkerGroup] = {}
    first: dict[str, WorkerGroup] = {}
    for pool, specs in by_pool.items():
        opened = fused_groups(start(pool, WorkerSpec(FusedWorker, (specs,))), specs)
        for group in opened.values():
            stack.callback(group.close)
        groups |= opened
        first[pool] = next(iter(opened.values()))
    actor = groups["actor_rollout"]
    ref = groups.get("ref", actor) if config.has_reference else None
    return RoleGroups(actor, groups["reward"], ref, groups.get("critic"), first)


def _specs(config: PPOHybridExperiment) -> dict[WorkerRole, WorkerSpec]:
    pool_of = config.workers.pool_of
    is_together = config.has_base_reference or pool_of("ref") == pool_of("actor_rollout")
    has_both = config.has_reference and is_together
    role = "actor_rollout_ref" if has_both else "actor_rollout"
    specs: dict[WorkerRole, WorkerSpec] = {
        "actor_rollout": WorkerSpec(ActorRolloutRefWorker, (_after_warmup(config), role))
    }
    if config.has_reference and not is_together:
        specs["ref"] = WorkerSpec(ActorRolloutRefWorker, (config, "ref"))
    if config.critic is not None:
        specs["critic"] = WorkerSpec(CriticWorker, (config,))
    specs["reward"] = WorkerSpec(RewardWorker, (config,))
    return specs


def _after_warmup(config: PPOHybridExperiment) -> PPOHybridExperiment:
    """Return the settings of a policy whose schedule starts once the critic has warmed up."""
    warmup_steps = 0 if config.critic is None else config.critic.warmup_steps
    total_steps = config.trainer.total_steps - warmup_steps
    trainer = config.trainer.model_copy(update={"total_steps": total_steps})
    return config.model_copy(update={"trainer": trainer})


def _launcher(config: PPOHybridExperiment, stack: ExitStack) -> PoolLauncher:
    """Return what starts the workers of a pool."""
    workers = config.workers
    if workers.launcher == "ray":
        return _ray_launcher(workers, stack)
    multiprocessing.set_forkserver_preload(PRELOADED)
    devices = pool_devices(workers.pools, _visible_gpus(config))

    def start(pool: str, spec: WorkerSpec) -> WorkerExecutor:
        return ProcessExecutor(
            spec,
            workers.pools[pool].num_workers,
            "forkserver",
            workers.start_timeout_s,
            workers.timeout_s,
            devices=devices[pool],
        )

    return start


def _ray_launcher(workers: WorkerGroupsConfig, stack: ExitStack) -> PoolLauncher:
    try:
        from headway.runtime.ray_clusters import join_cluster  # an extra
        from trainer.workers.ray_actors import RayExecutor
    except ImportError as error:
        raise ConfigError("Ray is not installed; install Headway with the extra 'ray'") from error
    stack.callback(join_cluster(workers.ray_address))

    def start(pool: str, spec: WorkerSpec) -> WorkerExecutor:
        section = workers.pools[pool]
        return RayExecutor(
            spec,
            section.num_workers,
            section.num_cpus,
            section.num_gpus,
            workers.start_timeout_s,
            workers.timeout_s,
        )

    return start


def _visible_gpus(config: PPOHybridExperiment) -> list[str]:
    if config.trainer.device == "cpu":
        return []
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name for name in named.split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]


def pool_devices(
    pools: Mapping[str, ResourcePoolConfig], gpus: list[str]
) -> dict[str, tuple[str, ...] | None]:
    """Return the GPU of each worker of each pool; None where there are none.

    Args:
        gpus: those of this machine, as CUDA_VISIBLE_DEVICES names them.
    Raises:
        ConfigError: there are fewer than the pools want.
    """
    given: dict[str, tuple[str, ...] | None] = {}
    taken = 0
    for name, pool in pools.items():
        if pool.devices or not gpus:
            given[name] = pool.devices or None
            continue
        given[name] = tuple(gpus[taken : taken + pool.num_workers])
        taken += pool.num_workers
        if taken > len(gpus):
            raise ConfigError(
                f"pool {name} wants {pool.num_workers} GPUs, and of {len(gpus)} only "
                f"{len(gpus) - taken + pool.num_workers} are left; use fewer workers, or name the same "
                "workers.pools.*.devices in pools that share them"
            )
    return given
