"""The critic: values, and its update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headway.contracts.config.critic import CriticConfig
from headway.contracts.config.rollout_experiments import PolicyLearner, critic_of
from headway.contracts.config.trainer import TokenNormalizeScope
from headway.contracts.errors import ConfigError
from trainer.algorithms.aggregation import aggregate, aggregation_weight, mean_mode
from trainer.algorithms.masked_statistics import MaskedStatistics
from trainer.algorithms.segments import Segments
from trainer.algorithms.values import ValueNormalizer, explained_variance, value_losses
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput, SaveLoadMeta, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.batching.shares import infer_column, mini_batches
from trainer.interfaces.base import Columns, InterfaceContext
from trainer.interfaces.updates import update
from trainer.topology import Topology


class PPOCritic:
    """The model of returns. Batches are whole, the same on every rank, unless a method says
    otherwise; every call is collective.

    Its engine computes in units of `normalizer`, which is None if those are the rewards'.
    """

    def __init__(
        self,
        engine: TrainEngine,
        topology: Topology,
        config: CriticConfig,
        mb_spec: MicroBatchSpec,
        num_minibatches: int = 1,
        scope: TokenNormalizeScope = "global",
        train_mb_spec: MicroBatchSpec | None = None,
    ) -> None:
        """Args:
        train_mb_spec: of the update; None takes `mb_spec`.
        """
        self._engine = engine
        self._topology = topology
        self._config = config
        self._mb_spec = mb_spec
        self._train_mb_spec = train_mb_spec or mb_spec
        self._num_minibatches = num_minibatches
        self._scope = scope
        self.normalizer = make_normalizer(config)

    @property
    def states(self) -> dict[str, ValueNormalizer]:
        """State that it learns besides the weights, for checkpoints."""
        return {} if self.normalizer is None else {"value_normalizer": self.normalizer}

    def infer(self, share: SequenceBatch) -> Tensor:
        """Return [T] values of this rank's share of a batch, as the engine computes them; collective.

        Args:
            share: column `input_ids`.
        """
        values: Tensor = self._engine.forward(share, self._mb_spec, post_hook=_values)
        return values

    def denormalize(self, values: Tensor) -> Tensor:
        """Convert the engine's output to units of the rewards."""
        return values if self.normalizer is None else self.normalizer.denormalize(values)

    def inference(self, batch: SequenceBatch) -> Columns:
        """Return the value of each state before the step's first update.

        Args:
            batch: column `input_ids`.
        Returns:
            `values` [T] in units of the rewards, and `normalized_values` [T] as the engine computed them.
        """
        values = infer_column(batch, self._topology, self.infer)
        return {"values": self.denormalize(values), "normalized_values": values}

    def train_step(self, batch: SequenceBatch) -> dict[str, float]:
        """One version, in as many optimizer steps as there are mini-batches, times epochs.

        Args:
            batch: columns `input_ids`, `group`, `loss_mask`, `returns`, and those of `inference`.
        Returns:
            `value_loss`, `value_clip_fraction`, `critic_grad_norm`, `critic_lr`,
            `critic_skipped_steps`, in float16 `critic_loss_scale`, means over the steps; of the values
            before them: `value_mean`, `return_mean` and `explained_variance`, which is absent where all
            returns are equal.
        """
        parts = mini_batches(batch, self._num_minibatches, self._topology)
        return self.train_parts(parts, self._config.num_epochs)

    def train_parts(self, parts: Sequence[SequenceBatch], epochs: int = 1) -> dict[str, float]:
        """Train on mini-batches that were split already.

        Args:
            parts: this rank's share of each; those of all ranks make up the batch.
            epochs: times that each is learned from.
        """
        returns = self._moments(parts, lambda part: part["returns"])
        metrics = self._describe(parts, returns)
        if self.normalizer is not None:
            self.normalizer.update(returns)
        aimed = [part.with_columns(targets=self._targets(part["returns"])) for part in parts]
        spec = self._train_mb_spec
        steps = (self._engine, aimed * epochs, spec, self._loss, self._weight, self._scope)
        done = update(*steps)
        done["value_loss"] = done.pop("loss")
        own = {"grad_norm", "lr", "skipped_steps", "loss_scale"}
        return metrics | {f"critic_{name}" if name in own else name: v for name, v in done.items()}

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face directory; collective."""
        self._engine.save(SaveLoadMeta(str(folder), weight_format="hf"))

    def _targets(self, returns: Tensor) -> Tensor:
        return returns if self.normalizer is None else self.normalizer.normalize(returns)

    def _loss(self, output: ModelOutput, batch: SequenceBatch) -> LossOutput:
        mask = batch["loss_mask"]
        losses, is_clipped = value_losses(
            torch.where(mask, output.values(), 0.0),
            torch.where(mask, batch["normalized_values"], 0.0),
            batch["targets"],
            self._config.eps_clip,
            self._config.huber_delta,
        )
        sequences, mode = Segments.of_lengths(batch.lengths, mask.device), self._config.aggregation
        share = aggregate(is_clipped.float(), mask, sequences, mean_mode(mode))
        loss = aggregate(losses, mask, sequences, mode)
        return LossOutput(loss, {"value_clip_fraction": share})

    def _weight(self, batch: SequenceBatch) -> float:
        sequences = Segments.of_lengths(batch.lengths, batch["loss_mask"].device)
        return aggregation_weight(batch["loss_mask"], sequences, self._config.aggregation)

    def _describe(
        self, parts: Sequence[SequenceBatch], returns: MaskedStatistics
    ) -> dict[str, float]:
        values = self._moments(parts, lambda part: part["values"])
        errors = self._moments(parts, lambda part: part["returns"] - part["values"])
        metrics = {"value_mean": values.mean, "return_mean": returns.mean}
        explained = explained_variance(errors, returns)
        return metrics if math.isnan(explained) else metrics | {"explained_variance": explained}

    def _moments(
        self, parts: Sequence[SequenceBatch], column: Callable[[SequenceBatch], Tensor]
    ) -> MaskedStatistics:
        """Over the tokens in the loss of all parts and ranks."""
        each = [MaskedStatistics.of(column(part), part["loss_mask"]) for part in parts]
        return MaskedStatistics(
            *self._topology.data_parallel.sum(
                [
                    sum(statistics.count for statistics in each),
                    sum(statistics.total for statistics in each),
                    sum(statistics.squares for statistics in each),
                ]
            )
        )


def make(context: InterfaceContext[PolicyLearner]) -> PPOCritic:
    """Build it as the experiment is configured.

    Raises:
        ConfigError: it has no critic.
    """
    config = critic_of(context.config)
    if config is None:
        raise ConfigError("the experiment has no section `critic`; set type=ppo")
    count = context.config.algorithm.num_minibatches
    return PPOCritic(
        context.model,
        context.topology,
        config,
        context.mb_spec,
        count,
        context.token_normalize_scope,
        context.train_mb_spec,
    )


def make_normalizer(config: CriticConfig) -> ValueNormalizer | None:
    """Build the normalizer that `normalization` selects."""
    if config.normalization == "none":
        return None
    decay = config.decay if config.normalization == "exponential" else None
    return ValueNormalizer(
        decay, initial_std=config.initial_std, min_weight=config.normalization_eps
    )


def _values(output: ModelOutput, batch: SequenceBatch) -> Tensor:
    return output.values()
