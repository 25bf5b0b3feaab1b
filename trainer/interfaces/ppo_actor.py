"""The actor: proximal logprobs, and the update of the policy."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.contracts.config.algorithm import AlgorithmConfig
from trainer.algorithms.losses import policy_loss, policy_loss_weight
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.batching.shares import infer_column
from trainer.interfaces.base import Columns
from trainer.interfaces.updates import update
from trainer.topology import Topology


class PPOActor:
    """The policy that learns. Batches are whole, the same on every rank; every call is collective."""

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

    def inference(self, batch: SequenceBatch) -> Columns:
        """`proximal_logprobs` [T] and `entropy` [T]: the policy's before the step's first update.

        Args:
            batch: columns `input_ids`, `labels`, `loss_mask`; what is off the mask is 0.
        """

        def infer(share: SequenceBatch) -> Tensor:
            both: Tensor = self._engine.forward(share, self._mb_spec, post_hook=self._judged)
            return both

        logprobs, entropy = infer_column(batch, self._topology, infer).unbind(-1)
        return {"proximal_logprobs": logprobs, "entropy": entropy}

    def train_step(self, batch: SequenceBatch) -> dict[str, float]:
        """One version, in as many optimizer steps as there are mini-batches.

        Args:
            batch: columns `input_ids`, `labels`, `group`, and those of `policy_loss`.
        Returns:
            Figures of the step, means over the tokens in the loss.
        """
        return update(
            self._engine,
            batch,
            self._config.num_minibatches,
            self._topology,
            self._mb_spec,
            self._loss,
            self._weight,
        )

    def _judged(self, output: ModelOutput, batch: SequenceBatch) -> Tensor:
        """[T, 2]; the entropy is for figures, and costs the pass little."""
        return torch.stack(self._logprobs_and_entropy(output, batch), dim=-1)

    def _logprobs_and_entropy(
        self, output: ModelOutput, batch: SequenceBatch
    ) -> tuple[Tensor, Tensor]:
        return output.logprobs_and_entropy(batch["labels"], self._temperature, batch["loss_mask"])

    def _loss(self, output: ModelOutput, batch: SequenceBatch) -> LossOutput:
        entropy = None
        if self._config.entropy_coef > 0:
            logprobs, entropy = self._logprobs_and_entropy(output, batch)
        else:
            logprobs = output.logprobs(batch["labels"], self._temperature, batch["loss_mask"])
        return LossOutput(*policy_loss(self._config, batch, logprobs, entropy))

    def _weight(self, batch: SequenceBatch) -> float:
        return policy_loss_weight(self._config, batch)
