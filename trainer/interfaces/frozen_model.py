"""A model that is asked and not trained: the reference, or a teacher."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from headway.contracts.config.rollout_experiments import PolicyLearner
from trainer.api import MicroBatchSpec, ModelOutput, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.batching.shares import infer_column
from trainer.interfaces.base import Columns, InterfaceContext
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
        top_k: int = 0,
    ) -> None:
        """
        Args:
            temperature: that the policy samples with; distributions are compared at the same one.
            column: name of what `inference` gives.
            is_base: the model is `engine`'s without its adapters.
            top_k: above 0 so many likeliest tokens are told, in place of the batch's.
        """
        self._engine = engine
        self._topology = topology
        self._mb_spec = mb_spec
        self._temperature = temperature
        self._column = column
        self._is_base = is_base
        self._top_k = top_k

    def infer(self, share: SequenceBatch) -> Tensor:
        """[T] logprobs of `labels`, 0 outside of the mask, of what this rank has of a batch; collective.

        With `top_k` it is [T, 2, top_k]: ids and logprobs of the likeliest tokens.

        Args:
            share: columns `input_ids`, `labels`, `action_mask`.
        """
        hook = self._top if self._top_k else self._logprobs
        with self._engine.without_adapters() if self._is_base else nullcontext():
            values: Tensor = self._engine.forward(share, self._mb_spec, post_hook=hook)
        return values

    def inference(self, batch: SequenceBatch) -> Columns:
        """The same of a whole batch, under the name that was given."""
        return {self._column: infer_column(batch, self._topology, self.infer)}

    def _logprobs(self, output: ModelOutput, batch: SequenceBatch) -> Tensor:
        return output.logprobs(batch["labels"], self._temperature, batch["action_mask"])

    def _top(self, output: ModelOutput, batch: SequenceBatch) -> Tensor:
        ids, logprobs = output.top(self._top_k, self._temperature, batch["action_mask"])
        return torch.stack([ids.to(logprobs.dtype), logprobs], dim=1)  # whole up to 2^24


def make_reference(context: InterfaceContext[PolicyLearner]) -> FrozenModel:
    """The model that the policy is kept near."""
    return _make(context, "reference_logprobs", context.config.has_base_reference)


def make_teacher(context: InterfaceContext[PolicyLearner]) -> FrozenModel:
    """The model that the policy learns from."""
    top_k = context.config.algorithm.distillation_top_k
    return _make(context, "teacher_top" if top_k else "teacher_logprobs", False, top_k)


def _make(
    context: InterfaceContext[PolicyLearner], column: str, is_base: bool, top_k: int = 0
) -> FrozenModel:
    temperature = context.config.sampling.temperature
    return FrozenModel(
        context.model, context.topology, context.mb_spec, temperature, column, is_base, top_k
    )
