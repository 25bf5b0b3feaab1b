"""The actor: proximal logprobs, advantages, and the decoupled PPO update."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.types import Trajectory
from trainer.algorithms.advantages import group_advantages, shape_rewards
from trainer.algorithms.losses import decoupled_ppo_loss
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput, TrainEngine
from trainer.batching import (
    SequenceBatch,
    batch_of_trajectories,
    first_branches,
    partition_by_tokens,
)
from trainer.topology import Topology


class PPOActor:
    """Trains the policy on one batch of whole prompt groups."""

    def __init__(
        self,
        engine: TrainEngine,
        topology: Topology,
        config: AlgorithmConfig,
        mb_spec: MicroBatchSpec,
        temperature: float,
    ) -> None:
        self._engine = engine
        self._topology = topology
        self._config = config
        self._mb_spec = mb_spec
        self._temperature = temperature

    def train_step(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """One version: every rank gets the whole batch and trains on its share.

        Args:
            trajectories: whole groups, the same list on every rank.
        Returns:
            Figures of the step, means over the tokens in the loss.
        """
        batch = batch_of_trajectories(trajectories)
        batch = batch.with_columns(advantages=self._token_advantages(batch, trajectories))
        if self._config.mask_truncated:
            whole = torch.tensor([t.stop_reason != "length" for t in trajectories])
            batch = batch.with_columns(loss_mask=batch["loss_mask"] & whole[batch["sequence"]])
        stats: dict[str, float] = {}
        mini_batches = self._mini_batches(batch, trajectories)
        # All proximal logprobs come before the first update: they belong to the step's first weights.
        prepared = [self._with_proximal(mini_batch) for mini_batch in mini_batches]
        for mini_batch in prepared:
            figures = self._engine.train_batch(mini_batch, self._mb_spec, self._loss, loss_tokens)
            for name, value in figures.items():
                stats[name] = stats.get(name, 0.0) + value / len(prepared)
        return stats

    def _mini_batches(
        self, batch: SequenceBatch, trajectories: list[Trajectory]
    ) -> list[SequenceBatch]:
        """This rank's share of each mini-batch; a mini-batch holds whole groups."""
        groups: dict[str, list[int]] = {}
        for index, trajectory in enumerate(trajectories):
            groups.setdefault(trajectory.rollout_id, []).append(index)
        members = list(groups.values())
        parts = self._config.num_minibatches
        mini_batches = []
        for number in range(parts):
            indices = [index for group in members[number::parts] for index in group]
            lengths = [batch.lengths[index] for index in indices]
            share = partition_by_tokens(lengths, self._topology.world_size)[self._topology.rank]
            mini_batches.append(batch.select([indices[i] for i in share]))
        return mini_batches

    def _token_advantages(self, batch: SequenceBatch, trajectories: list[Trajectory]) -> Tensor:
        config = self._config
        scores = torch.tensor([t.reward for t in trajectories])
        rewards = shape_rewards(
            scores, config.reward_bias, config.reward_scaling, config.reward_clip
        )
        names = {
            rollout_id: n for n, rollout_id in enumerate({t.rollout_id: None for t in trajectories})
        }
        group_ids = torch.tensor([names[t.rollout_id] for t in trajectories])
        advantages = group_advantages(
            rewards,
            group_ids,
            config.scale_by_std,
            counts=torch.tensor(first_branches(trajectories)),
        )
        return advantages[batch["sequence"]]

    def _with_proximal(self, batch: SequenceBatch) -> SequenceBatch:
        if not self._config.decoupled:
            return batch.with_columns(proximal_logprobs=batch["behaviour_logprobs"])
        logprobs = self._engine.forward(batch, self._mb_spec, post_hook=self._logprobs)
        return batch.with_columns(proximal_logprobs=logprobs)

    def _logprobs(self, output: ModelOutput, batch: SequenceBatch) -> Tensor:
        return output.logprobs(batch["labels"], self._temperature)

    def _loss(self, output: ModelOutput, batch: SequenceBatch) -> LossOutput:
        config = self._config
        loss, stats = decoupled_ppo_loss(
            self._logprobs(output, batch),
            batch["proximal_logprobs"],
            batch["behaviour_logprobs"],
            batch["advantages"],
            batch["loss_mask"],
            eps_clip=config.eps_clip,
            eps_clip_higher=config.eps_clip_higher,
            behaviour_weight_cap=config.behaviour_weight_cap if config.decoupled else None,
        )
        return LossOutput(loss, stats)


def loss_tokens(batch: SequenceBatch) -> float:
    """Weight of a micro-batch: its tokens in the loss."""
    return float(batch["loss_mask"].sum())
