"""Parts of a step of `ppo-hybrid`: what models add to a batch, their updates, and what is measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headway.contracts.config.ppo_hybrid import PPOHybridExperiment
from trainer.checkpoint import CheckpointContents, RunState
from trainer.exports import Exports
from trainer.hybrid.transfer_cost import TransferCost
from trainer.workers.data_proto import DataProto
from trainer.workers.resource_pools import RoleGroups

log = logging.getLogger(__name__)
PROFILES = "profiles"


def infer_columns(groups: RoleGroups, batch: DataProto) -> DataProto:
    """Return the batch with scores and the columns of all models; pools work side by side."""
    calls = [
        groups.reward.submit("compute_rm_score", batch),
        groups.actor_rollout.submit("compute_log_prob", batch),
    ]
    if groups.ref is not None:
        calls.append(groups.ref.submit("compute_ref_log_prob", batch))
    if groups.critic is not None:
        calls.append(groups.critic.submit("compute_values", batch))
    for call in calls:
        batch = batch.union(call.result())
    return batch


def update_models(groups: RoleGroups, batch: DataProto, trains_policy: bool) -> dict[str, float]:
    """Update the critic, and the policy unless the critic warms up; pools work side by side.

    Returns:
        Metrics of the updates.
    """
    batch = batch.select(sorted(batch.tensors))  # updates read no objects
    calls = []
    if groups.critic is not None:
        calls.append(groups.critic.submit("update_critic", batch))
    if trains_policy:
        calls.append(groups.actor_rollout.submit("update_actor", batch))
    metrics: dict[str, float] = {}
    for call in calls:
        metrics |= call.result()
    return metrics


def describe_rows(state: RunState, batch: DataProto) -> dict[str, Any]:
    """Return the metrics of the batch that step `state.step` learns from, as those of other experiments
    are called: its rollouts are of the version that learns from them.
    """
    tokens = int(batch["attention_mask"].sum())
    return {
        "step": state.step,
        "version": state.version,
        "time": time.time(),
        "reward": float(batch["scores"].double().mean()),
        "staleness_max": 0,
        "staleness_mean": 0.0,
        "staleness_trajectories": [len(batch)],
        "staleness_tokens": [int(batch["response_mask"].sum())],
        "mixed_versions": 0.0,
        "response_tokens": float(batch["response_mask"].sum(1).double().mean()),
        "truncated": float(batch["truncated"].double().mean()),
        "trajectories": len(batch),
        "tokens": tokens,
    }


class StepTimer:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self._began = self._generated = self._trained = time.monotonic()

    def generated(self) -> None:
        """The responses are there."""
        self._generated = time.monotonic()

    def trained(self) -> None:
        """The models have learned."""
        self._trained = time.monotonic()

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of generation, and of everything between it and the end of the updates."""
        return self._generated - self._began, self._trained - self._generated


class StepWatcher:
    """What is measured around steps: profiles, speed, hand-over of weights, evaluations."""

    def __init__(
        self,
        config: PPOHybridExperiment,
        groups: RoleGroups,
        contents: CheckpointContents,
        exports: Exports,
        evaluate: Callable[[], dict[str, float]] | None,
    ) -> None:
        """
        Args:
            contents: of checkpoints; its models are exported, too.
            evaluate: None where nothing is evaluated.
        """
        self._config = config
        self._groups = groups
        self._evaluate = evaluate
        self.contents = contents
        self._exports = exports

    def begin(self, step: int) -> None:
        """A step begins."""
        self._groups.actor_rollout.begin_step()
        if step in self._config.profiler.steps:
            for group in self._groups.pools.values():
                group.start_profile(self._config.profiler.ranks)

    def end(self, num_done: int, tokens: int, timer: StepTimer) -> dict[str, Any]:
        """A step ended.

        Args:
            num_done: steps that are done.
            tokens: of its batch.
        Returns:
            Metrics of its speed, of the hand-over, and of an evaluation that was due.
        """
        if num_done - 1 in self._config.profiler.steps:
            self._write_profiles(num_done - 1)
        transfers = self._transfers()
        longest_s = max((each.seconds for each in transfers), default=0.0)
        generate_s, train_s = timer.seconds
        actor = self._groups.actor_rollout
        stats = actor.end_step(tokens, generate_s - longest_s, train_s, longest_s)[0]
        stats |= _describe(transfers)
        if num_done == 1:
            log.info("weights were handed over to generation", extra=_describe(transfers))
        self._exports.after_step(num_done, self.contents.models)
        settings = self._config.evaluation
        if self._evaluate is not None and settings is not None:
            is_last = num_done == self._config.trainer.last_step
            if is_last or num_done % settings.every_steps == 0:
                stats |= self._evaluate()
        return dict(stats)

    def _transfers(self) -> list[TransferCost]:
        actor = self._groups.actor_rollout
        each = [actor.worker(rank).last_transfer() for rank in range(actor.world_size)]
        return [cost for cost in each if cost is not None]

    def _write_profiles(self, step: int) -> None:
        folder = Path(self._config.run_dir).resolve() / PROFILES / f"step-{step}"
        for name, group in self._groups.pools.items():
            group.stop_profile(str(folder / name))


def _describe(transfers: list[TransferCost]) -> dict[str, float]:
    """Return the metrics of the rank with the largest copy, and their sum over the ranks."""
    if not transfers:
        return {}
    largest = max(transfers, key=lambda each: each.copied_bytes)
    copied = float(sum(each.copied_bytes for each in transfers))
    return {**largest.metrics(), "weight_transfer_copied_bytes_all_ranks": copied}


def mean_score(batch: DataProto) -> dict[str, float]:
    """Return the metrics of an evaluation."""
    scores: torch.Tensor = batch["scores"]
    return {
        "evaluation_score": float(scores.double().mean()),
        "evaluation_response_tokens": float(batch["response_mask"].sum(1).double().mean()),
        "evaluation_num_prompts": float(len(scores)),
    }
