"""The critic: values, and its update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headway.contracts.config.critic import CriticConfig
from headway.contracts.config.rollout_experiments import PolicyLearner, critic_of
from headway.contracts.errors import ConfigError
from trainer.algorithms.aggregation import masked_mean
from trainer.algorithms.moments import Moments
from trainer.algorithms.values import ValueNormalizer, explained_variance, value_losses
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.batching.shares import infer_column, mini_batches
from trainer.interfaces.base import Columns, InterfaceContext
from trainer.interfaces.updates import loss_tokens, update
from trainer.topology import Topology


class PPOCritic:
    """The model of returns. Batches are whole, the same on every rank, unless a method says
    otherwise; every call is collective.

    Its engine speaks in units of `normalizer`, which is None where it speaks in those of the rewards.
    """

    def __init__(
        self,
        engine: TrainEngine,
        topology: Topology,
        config: CriticConfig,
        mb_spec: MicroBatchSpec,
        num_minibatches: int = 1,
    ) -> None:
        self._engine = engine
        self._topology = topology
        self._config = config
        self._mb_spec = mb_spec
        self._num_minibatches = num_minibatches
        self.normalizer = make_normalizer(config)

    @property
    def numbers(self) -> dict[str, ValueNormalizer]:
        """What it learns besides the weights, for checkpoints."""
        return {} if self.normalizer is None else {"value_normalizer": self.normalizer}

    def infer(self, share: SequenceBatch) -> Tensor:
        """[T] values of what this rank has of a batch, as the engine says them; collective.

        Args:
            share: column `input_ids`.
        """
        values: Tensor = self._engine.forward(share, self._mb_spec, post_hook=_values)
        return values

    def denormalize(self, said: Tensor) -> Tensor:
        """What the engine said, in units of the rewards."""
        return said if self.normalizer is None else self.normalizer.denormalize(said)

    def inference(self, batch: SequenceBatch) -> Columns:
        """What each state is worth before the step's first update.

        Args:
            batch: column `input_ids`.
        Returns:
            `values` [T] in units of the rewards, and `normalized_values` [T] as the engine said them.
        """
        said = infer_column(batch, self._topology, self.infer)
        return {"values": self.denormalize(said), "normalized_values": said}

    def train_step(self, batch: SequenceBatch) -> dict[str, float]:
        """One version, in as many optimizer steps as there are mini-batches, times epochs.

        Args:
            batch: columns `input_ids`, `group`, `loss_mask`, `returns`, and those of `inference`.
        Returns:
            `value_loss`, `value_clip_fraction`, `critic_grad_norm`, `critic_lr`,
            `critic_skipped_steps`, means over the steps; of the values before them: `value_mean`,
            `return_mean` and `explained_variance`, which is absent where all returns are equal.
        """
        parts = mini_batches(batch, self._num_minibatches, self._topology)
        return self.train_parts(parts, self._config.num_epochs)

    def train_parts(self, parts: Sequence[SequenceBatch], epochs: int = 1) -> dict[str, float]:
        """The same, of mini-batches that were cut already.

        Args:
            parts: this rank's share of each; those of all ranks make up the batch.
            epochs: times that each is learned from.
        """
        returns = self._moments(parts, lambda part: part["returns"])
        figures = self._describe(parts, returns)
        if self.normalizer is not None:
            self.normalizer.update(returns)
        aimed = [part.with_columns(targets=self._targets(part["returns"])) for part in parts]
        done = update(self._engine, aimed * epochs, self._mb_spec, self._loss, loss_tokens)
        done["value_loss"] = done.pop("loss")
        own = {"grad_norm", "lr", "skipped_steps"}
        return figures | {f"critic_{name}" if name in own else name: v for name, v in done.items()}

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
        share = masked_mean(is_clipped.float(), mask)
        return LossOutput(masked_mean(losses, mask), {"value_clip_fraction": share})

    def _describe(self, parts: Sequence[SequenceBatch], returns: Moments) -> dict[str, float]:
        values = self._moments(parts, lambda part: part["values"])
        errors = self._moments(parts, lambda part: part["returns"] - part["values"])
        figures = {"value_mean": values.mean, "return_mean": returns.mean}
        explained = explained_variance(errors, returns)
        return figures if math.isnan(explained) else figures | {"explained_variance": explained}

    def _moments(
        self, parts: Sequence[SequenceBatch], column: Callable[[SequenceBatch], Tensor]
    ) -> Moments:
        """Over the tokens in the loss of all parts and ranks."""
        each = [Moments.of(column(part), part["loss_mask"]) for part in parts]
        return Moments(
            *self._topology.sum(
                [
                    sum(moments.count for moments in each),
                    sum(moments.total for moments in each),
                    sum(moments.squares for moments in each),
                ]
            )
        )


def make(context: InterfaceContext[PolicyLearner]) -> PPOCritic:
    """As the experiment says.

    Raises:
        ConfigError: it has no critic.
    """
    config = critic_of(context.config)
    if config is None:
        raise ConfigError("the experiment has no section `critic`; set type=ppo")
    count = context.config.algorithm.num_minibatches
    return PPOCritic(context.model, context.topology, config, context.mb_spec, count)


def make_normalizer(config: CriticConfig) -> ValueNormalizer | None:
    """As `normalization` says."""
    if config.normalization == "none":
        return None
    decay = config.decay if config.normalization == "exponential" else None
    return ValueNormalizer(
        decay, initial_std=config.initial_std, min_weight=config.normalization_eps
    )


def _values(output: ModelOutput, batch: SequenceBatch) -> Tensor:
    return output.values()
