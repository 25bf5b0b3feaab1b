"""The actor: proximal logprobs, advantages, and the decoupled PPO update."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.errors import ConfigError
from headway.contracts.types import PolicyVersion, Trajectory
from trainer.algorithms.corrections import proximal_shares, within_second_moment
from trainer.algorithms.credit import normalized_advantages, token_advantages, trajectory_rewards
from trainer.algorithms.diagnostics import Mismatch
from trainer.algorithms.losses import policy_loss, policy_loss_weight
from trainer.algorithms.moments import Moments
from trainer.algorithms.ratios import log_ratios
from trainer.algorithms.segments import Segments
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput, TrainEngine
from trainer.batching.balance import partition_by_tokens
from trainer.batching.sequences import SequenceBatch, batch_of_trajectories, first_branches
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
        reference: TrainEngine | None = None,
    ) -> None:
        """
        Args:
            reference: a model that is not trained; wanted where `kl_coef` is above 0.
        Raises:
            ConfigError: it is wanted, and there is none.
        """
        if config.kl_coef > 0 and reference is None:
            raise ConfigError(
                f"algorithm.kl_coef={config.kl_coef} wants a reference model, and this experiment "
                "has none; set algorithm.kl_coef=0"
            )
        self._engine = engine
        self._topology = topology
        self._config = config
        self._mb_spec = mb_spec
        self._temperature = temperature
        self._reference = reference

    def train_step(
        self, trajectories: list[Trajectory], version: PolicyVersion
    ) -> dict[str, float]:
        """One version: every rank gets the whole batch and trains on its share.

        Args:
            trajectories: whole groups, the same list on every rank.
            version: of the weights that the step starts from.
        Returns:
            Figures of the step, means over the tokens in the loss.
        """
        mini_batches = self._mini_batches(self._judged(trajectories), trajectories)
        # All proximal logprobs come before the first update: they belong to the step's first weights.
        prepared = [self._with_proximal(mini_batch, version) for mini_batch in mini_batches]
        is_known = self._config.decoupled and self._config.proximal == "recompute"
        stats = self._mismatch(prepared) if is_known else {}
        for mini_batch in prepared:
            figures = self._engine.train_batch(mini_batch, self._mb_spec, self._loss, self._weight)
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

    def _judged(self, trajectories: list[Trajectory]) -> SequenceBatch:
        """The whole batch with its advantages, and with what the loss leaves out taken off its mask."""
        config = self._config
        batch = batch_of_trajectories(trajectories)
        sequences, mask = Segments(batch["sequence"], len(trajectories)), batch["loss_mask"]
        truncated = torch.tensor([t.stop_reason == "length" for t in trajectories])
        scores = torch.tensor([t.reward for t in trajectories])
        rewards = trajectory_rewards(config, scores, sequences.sizes(mask), truncated)
        numbers = {t.rollout_id: number for number, t in enumerate(trajectories)}
        groups = torch.tensor([numbers[t.rollout_id] for t in trajectories])
        counts = torch.tensor(first_branches(trajectories))
        advantages = token_advantages(config, rewards, groups, counts, mask, sequences)
        if config.mask_truncated:
            mask = mask & ~truncated[sequences.index]
        advantages = normalized_advantages(config, advantages, groups, mask, sequences)
        return batch.with_columns(advantages=advantages, loss_mask=mask)

    def _with_proximal(self, batch: SequenceBatch, version: PolicyVersion) -> SequenceBatch:
        """With what is fixed before the step's first update."""
        if self._reference is not None and self._config.kl_coef > 0:
            logprobs = self._reference.forward(batch, self._mb_spec, post_hook=self._logprobs)
            batch = batch.with_columns(reference_logprobs=logprobs)
        if not self._config.decoupled:
            return batch.with_columns(proximal_logprobs=batch["behaviour_logprobs"])
        if self._config.proximal == "interpolate":
            shares = proximal_shares(batch["behaviour_versions"], version)
            return batch.with_columns(proximal_shares=shares)
        judged = self._engine.forward(batch, self._mb_spec, post_hook=self._logprobs_and_entropy)
        proximal, entropy = judged.unbind(-1)
        batch = batch.with_columns(proximal_logprobs=proximal, entropy=entropy)
        if self._config.m2_threshold is None:
            return batch
        mask = batch["loss_mask"]
        logs = log_ratios(proximal, batch["behaviour_logprobs"], mask)
        return batch.with_columns(near=within_second_moment(logs, mask, self._config.m2_threshold))

    def _mismatch(self, batches: list[SequenceBatch]) -> dict[str, float]:
        """The step's first policy, and how far the servers' is from it, over all ranks."""
        names = ("proximal_logprobs", "behaviour_logprobs", "loss_mask")
        columns = [torch.cat([batch[name] for batch in batches]) for name in names]
        mismatch = Mismatch.of(*columns).shared(self._topology.sum, self._topology.maxima)
        figures = {
            "logprob_diff_mean": mismatch.mean_distance,
            "logprob_diff_max": mismatch.max_distance,
            "effective_sample_size": mismatch.effective_sample_size,
        }
        if self._config.entropy_coef == 0:  # else the loss tells
            entropy = torch.cat([batch["entropy"] for batch in batches])
            figures["entropy"] = Moments.of(entropy, columns[-1]).shared(self._topology.sum).mean
        return figures

    def _logprobs_and_entropy(self, output: ModelOutput, batch: SequenceBatch) -> Tensor:
        """[T, 2]; the entropy is for figures, and costs the pass little."""
        pair = output.logprobs_and_entropy(batch["labels"], self._temperature)
        return torch.stack(pair, dim=-1)

    def _logprobs(self, output: ModelOutput, batch: SequenceBatch) -> Tensor:
        return output.logprobs(batch["labels"], self._temperature)

    def _loss(self, output: ModelOutput, batch: SequenceBatch) -> LossOutput:
        entropy = None
        if self._config.entropy_coef > 0:
            logprobs, entropy = output.logprobs_and_entropy(batch["labels"], self._temperature)
        else:
            logprobs = self._logprobs(output, batch)
        return LossOutput(*policy_loss(self._config, batch, logprobs, entropy))

    def _weight(self, batch: SequenceBatch) -> float:
        return policy_loss_weight(self._config, batch)


def loss_tokens(batch: SequenceBatch) -> float:
    """Weight of a micro-batch: its tokens in the loss."""
    return float(batch["loss_mask"].sum())
