"""The critic: values, and its update."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headway.contracts.config.critic import CriticConfig
from trainer.algorithms.aggregation import masked_mean
from trainer.algorithms.moments import Moments
from trainer.algorithms.values import ValueNormalizer, explained_variance, value_losses
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.batching.shares import infer_column
from trainer.interfaces.base import Columns
from trainer.interfaces.updates import loss_tokens, update
from trainer.topology import Topology


class PPOCritic:
    """The model of returns. Batches are whole, the same on every rank; every call is collective.

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

    def inference(self, batch: SequenceBatch) -> Columns:
        """What each state is worth before the step's first update.

        Args:
            batch: column `input_ids`.
        Returns:
            `values` [T] in units of the rewards, and `normalized_values` [T] as the engine said them.
        """

        def infer(share: SequenceBatch) -> Tensor:
            values: Tensor = self._engine.forward(share, self._mb_spec, post_hook=_values)
            return values

        said = infer_column(batch, self._topology, infer)
        values = said if self.normalizer is None else self.normalizer.denormalize(said)
        return {"values": values, "normalized_values": said}

    def train_step(self, batch: SequenceBatch) -> dict[str, float]:
        """One version, in as many optimizer steps as there are mini-batches.

        Args:
            batch: columns `input_ids`, `group`, `loss_mask`, `returns`, and those of `inference`.
        Returns:
            `value_loss`, `value_clip_fraction`, `critic_grad_norm`, `critic_lr`,
            `critic_skipped_steps`, means over the steps; of the values before them: `value_mean`,
            `return_mean` and `explained_variance`, which is absent where all returns are equal.
        """
        figures = self._describe(batch)
        targets = batch["returns"]
        if self.normalizer is not None:
            self.normalizer.update(Moments.of(targets, batch["loss_mask"]))
            targets = self.normalizer.normalize(targets)
        done = update(
            self._engine,
            batch.with_columns(targets=targets),
            self._num_minibatches,
            self._topology,
            self._mb_spec,
            self._loss,
            loss_tokens,
        )
        done["value_loss"] = done.pop("loss")
        own = {"grad_norm", "lr", "skipped_steps"}
        return figures | {f"critic_{name}" if name in own else name: v for name, v in done.items()}

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

    def _describe(self, batch: SequenceBatch) -> dict[str, float]:
        mask, values, returns = batch["loss_mask"], batch["values"], batch["returns"]
        earned = Moments.of(returns, mask)
        figures = {"value_mean": Moments.of(values, mask).mean, "return_mean": earned.mean}
        explained = explained_variance(Moments.of(returns - values, mask), earned)
        return figures if math.isnan(explained) else figures | {"explained_variance": explained}


def make_normalizer(config: CriticConfig) -> ValueNormalizer | None:
    """As `normalization` says."""
    if config.normalization == "none":
        return None
    return ValueNormalizer(config.decay if config.normalization == "exponential" else None)


def _values(output: ModelOutput, batch: SequenceBatch) -> Tensor:
    return output.values()
