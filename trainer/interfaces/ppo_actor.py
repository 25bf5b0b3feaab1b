"""The actor: proximal logprobs, and the update of the policy."""

from __future__ import annotations

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
        """`proximal_logprobs` [T]: the policy's before the step's first update.

        Args:
            batch: columns `input_ids`, `labels`.
        """

        def infer(share: SequenceBatch) -> Tensor:
            logprobs: Tensor = self._engine.forward(share, self._mb_spec, post_hook=self._logprobs)
            return logprobs

        return {"proximal_logprobs": infer_column(batch, self._topology, infer)}

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

    def _logprobs(self, output: ModelOutput, batch: SequenceBatch) -> Tensor:
        return output.logprobs(batch["labels"], self._temperature, batch["loss_mask"])

    def _loss(self, output: ModelOutput, batch: SequenceBatch) -> LossOutput:
        entropy = None
        if self._config.entropy_coef > 0:
            logprobs, entropy = output.logprobs_and_entropy(
                batch["labels"], self._temperature, batch["loss_mask"]
            )
        else:
            logprobs = self._logprobs(output, batch)
        return LossOutput(*policy_loss(self._config, batch, logprobs, entropy))

    def _weight(self, batch: SequenceBatch) -> float:
        return policy_loss_weight(self._config, batch)
