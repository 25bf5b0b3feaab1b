"""Scores of a whole batch by a reward model, as `type: rw` trains one."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig

from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import EMPTY
from headway.contracts.config.rollout_experiments import PolicyLearner
from trainer.algorithms.segments import Segments
from trainer.api import MicroBatchSpec, ModelOutput, TrainEngine
from trainer.backends.base import make_engine
from trainer.batching.sequences import SequenceBatch
from trainer.batching.shares import infer_column
from trainer.interfaces.answers import AnswerTextRule, spread_scores
from trainer.interfaces.base import Columns, InterfaceContext
from trainer.topology import Topology


class ModelReward:
    """A model with a scalar head, asked and not trained.

    It reads the policy's tokens: the tokenizers of the two are the same.
    """

    def __init__(
        self,
        engine: TrainEngine,
        topology: Topology,
        mb_spec: MicroBatchSpec,
        padding: int | None = None,
        bias: float = 0.0,
        scaling: float = 1.0,
        rule: AnswerTextRule | None = None,
        is_dense: bool = False,
    ) -> None:
        """
        Args:
            engine: with `model.head=value`.
            padding: the token that the model was taught to skip at the end (`padding_of_model`).
            bias, scaling: the score is `(value + bias) · scaling`.
            rule: applied to the scores.
            is_dense: every token is scored, too.
        """
        self._engine = engine
        self._topology = topology
        self._mb_spec = mb_spec
        self._padding = padding
        self._bias = bias
        self._scaling = scaling
        self._rule = rule
        self._is_dense = is_dense

    def inference(self, batch: SequenceBatch) -> Columns:
        """`scores` [T], the same all over each sequence; collective.

        It is the value at the last token that is no padding, as transformers reads it. Where it is dense,
        also `dense_scores` [T], of the text that ends with each token.

        Args:
            batch: whole, the same on every rank; column `input_ids`, for a rule also `action_mask`.
        """

        def infer(share: SequenceBatch) -> Tensor:
            values: Tensor = self._engine.forward(share, self._mb_spec, post_hook=_values)
            return values

        values = infer_column(batch, self._topology, infer)
        outputs = values[last_tokens(batch, self._padding)].double()
        scores: list[float] = ((outputs + self._bias) * self._scaling).tolist()
        if self._rule is not None:
            scores = self._rule.apply(scores, batch)
        columns = {"scores": spread_scores(scores, batch)}
        if self._is_dense:
            columns["dense_scores"] = (values + self._bias) * self._scaling
        return columns


def last_tokens(batch: SequenceBatch, padding: int | None) -> Tensor:
    """[N] where in the batch the last token of each sequence stands that is no padding; of nothing else
    than padding, the first."""
    lengths = torch.tensor(batch.lengths)
    ids = batch["input_ids"]
    is_read = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
    latest = Segments.of_lengths(batch.lengths).last(is_read)
    return torch.maximum(latest, lengths.cumsum(0) - lengths)


def padding_of_model(path: str) -> int | None:
    """The token that transformers skips at the end of what this model reads; None skips none."""
    model = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    padding: int | None = model.pad_token_id
    return padding


def _values(output: ModelOutput, batch: SequenceBatch) -> Tensor:
    return output.values()


def make(
    context: InterfaceContext[PolicyLearner], path: str, bias: float = 0.0, scaling: float = 1.0
) -> ModelReward:
    """A model of its own.

    Args:
        path: directory of a sequence classification model with one label; its tokens are the policy's.
        bias, scaling: the score is `(value + bias) · scaling`.
    """
    model = TrainedModelConfig(path=path, head="value")
    engine = make_engine(context.config, context.topology, None, model, EMPTY)
    engine.initialize(None, None)
    padding = padding_of_model(path)
    return ModelReward(engine, context.topology, context.mb_spec, padding, bias, scaling)
