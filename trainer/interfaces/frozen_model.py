"""A model that is asked and not trained: the reference, or a teacher."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from trainer.api import MicroBatchSpec, ModelOutput, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.batching.shares import infer_column
from trainer.interfaces.base import Columns
from trainer.topology import Topology


class FrozenModel:
    """Logprobs of the batch's tokens under another model."""

    def __init__(
        self,
        engine: TrainEngine,
        topology: Topology,
        mb_spec: MicroBatchSpec,
        temperature: float,
        column: str,
        is_base: bool = False,
    ) -> None:
        """
        Args:
            temperature: that the policy samples with; distributions are compared at the same one.
            column: name of what `inference` gives.
            is_base: the model is `engine`'s without its adapters.
        """
        self._engine = engine
        self._topology = topology
        self._mb_spec = mb_spec
        self._temperature = temperature
        self._column = column
        self._is_base = is_base

    def inference(self, batch: SequenceBatch) -> Columns:
        """Logprobs [T] of `labels`, 0 outside of the mask, under the name that was given; collective.

        Args:
            batch: whole; columns `input_ids`, `labels`, `loss_mask`.
        """

        def infer(share: SequenceBatch) -> Tensor:
            logprobs: Tensor = self._engine.forward(share, self._mb_spec, post_hook=self._logprobs)
            return logprobs

        with self._engine.without_adapters() if self._is_base else nullcontext():
            return {self._column: infer_column(batch, self._topology, infer)}

    def _logprobs(self, output: ModelOutput, batch: SequenceBatch) -> Tensor:
        return output.logprobs(batch["labels"], self._temperature, batch["loss_mask"])
