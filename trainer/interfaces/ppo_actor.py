"""The actor: proximal logprobs, and the update of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.rollout_experiments import PolicyLearner
from headway.contracts.config.trainer import TokenNormalizeScope
from trainer.algorithms.losses import (
    SQUARE_WEIGHT,
    is_proximal_from_update,
    policy_loss,
    policy_loss_weight,
)
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput, SaveLoadMeta, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.batching.shares import infer_column, mini_batches
from trainer.interfaces.base import Columns, InterfaceContext
from trainer.interfaces.updates import update
from trainer.topology import Topology


class PPOActor:
    """The policy that learns. Batches are whole, the same on every rank, unless a method says
    otherwise; every call is collective."""

    def __init__(
        self,
        engine: TrainEngine,
        topology: Topology,
        config: AlgorithmConfig,
        mb_spec: MicroBatchSpec,
        temperature: float,
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
        self._temperature = temperature
        self._scope = scope

    def infer(self, share: SequenceBatch) -> Tensor:
        """[T, 2] logprob and entropy of what this rank has of a batch; collective.

        Args:
            share: columns `input_ids`, `labels`, `action_mask`; what is off the mask is 0.
        """
        both: Tensor = self._engine.forward(share, self._mb_spec, post_hook=self._judged)
        return both

    def inference(self, batch: SequenceBatch) -> Columns:
        """`proximal_logprobs` [T] and `entropy` [T]: the policy's before the step's first update.

        Args:
            batch: whole, as that of `infer`.
        """
        logprobs, entropy = infer_column(batch, self._topology, self.infer).unbind(-1)
        return {"proximal_logprobs": logprobs, "entropy": entropy}

    def train_step(self, batch: SequenceBatch) -> dict[str, float]:
        """One version, in as many optimizer steps as there are mini-batches, times epochs.

        Args:
            batch: columns `input_ids`, `labels`, `group`, and those of `policy_loss`.
        Returns:
            Metrics of the step, means over the tokens in the loss.
        """
        parts = mini_batches(batch, self._config.num_minibatches, self._topology)
        return self.train_parts(parts * self._config.num_epochs)

    def train_parts(self, parts: Sequence[SequenceBatch]) -> dict[str, float]:
        """Train on mini-batches that were split already.

        Args:
            parts: this rank's share of each, as often as it is learned from.
        """
        steps = (self._engine, parts, self._train_mb_spec, self._loss, self._weight, self._scope)
        metrics = update(*steps)
        square = metrics.pop(SQUARE_WEIGHT, None)
        if square is not None:
            weight = metrics["behaviour_weight"]
            metrics["effective_sample_size"] = weight**2 / square if square > 0.0 else 1.0
        return metrics

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face directory; collective."""
        self._engine.save(SaveLoadMeta(str(folder), weight_format="hf"))

    def _judged(self, output: ModelOutput, batch: SequenceBatch) -> Tensor:
        """[T, 2]; the entropy is for metrics, and costs the pass little."""
        mask = batch["action_mask"]
        both = output.logprobs_and_entropy(batch["labels"], self._temperature, mask)
        return torch.stack(both, dim=-1)

    def _loss(self, output: ModelOutput, batch: SequenceBatch) -> LossOutput:
        config, entropy, top_logprobs = self._config, None, None
        labels = batch["labels"]
        if config.distillation_top_k:
            labels = torch.cat([labels[:, None], batch["teacher_top"][:, 0].long()], dim=1)
        asked = (labels, self._temperature, batch["loss_mask"])
        if config.entropy_coef > 0:
            logprobs, entropy = output.logprobs_and_entropy(*asked)
        elif is_proximal_from_update(config, batch):
            logprobs, undetached = output.logprobs_and_entropy(*asked)
            entropy = undetached.detach()
        else:
            logprobs = output.logprobs(*asked)
        if config.distillation_top_k:
            logprobs, top_logprobs = logprobs[:, 0], logprobs[:, 1:]
        over_ranks = self._topology.sum_tensor if self._topology.world_size > 1 else None
        return LossOutput(*policy_loss(config, batch, logprobs, entropy, over_ranks, top_logprobs))

    def _weight(self, batch: SequenceBatch) -> float:
        return policy_loss_weight(self._config, batch)


def make(context: InterfaceContext[PolicyLearner]) -> PPOActor:
    """Build it as the experiment is configured."""
    config = context.config
    return PPOActor(
        context.model,
        context.topology,
        config.algorithm,
        context.mb_spec,
        config.sampling.temperature,
        context.token_normalize_scope,
        context.train_mb_spec,
    )
