"""A reward model: the score of the chosen answer above that of the rejected one."""

from __future__ import annotations

from torch import Tensor

from headway.contracts.config.experiment import RWExperiment
from trainer.algorithms.preference import (
    bradley_terry_loss,
    pair_margins,
    pair_metrics,
    sequence_scores,
)
from trainer.algorithms.segments import Segments
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.base import InterfaceContext
from trainer.interfaces.supervised import SupervisedInterface


class RewardModelObjective:
    """The mean over pairs."""

    granularity = 2

    def prepare(self, batch: SequenceBatch, mb_spec: MicroBatchSpec) -> SequenceBatch:
        return batch

    def loss(self, output: ModelOutput, batch: SequenceBatch) -> LossOutput:
        scores = score_sequences(output, batch).double()
        wanted = batch.per_sequence("margin")[0::2] if "margin" in batch.columns else None
        loss = bradley_terry_loss(pair_margins(scores), wanted)
        return LossOutput(loss, pair_metrics(scores))

    def weight(self, batch: SequenceBatch) -> float:
        return num_pairs(batch)


def make(context: InterfaceContext[RWExperiment]) -> SupervisedInterface:
    """Build it as the experiment is configured."""
    return SupervisedInterface.of(RewardModelObjective(), context)


def score_sequences(output: ModelOutput, batch: SequenceBatch) -> Tensor:
    """Return [number of sequences] scores of a reward model.

    As a hook of `TrainEngine.forward` it wants `output_seqlens` of ones.
    """
    return sequence_scores(output.values(), _sequences(batch))


def num_pairs(batch: SequenceBatch) -> float:
    """Weight of a micro-batch of pairs."""
    return len(batch.lengths) / 2


def _sequences(batch: SequenceBatch) -> Segments:
    return Segments.of_lengths(batch.lengths, batch["input_ids"].device)
