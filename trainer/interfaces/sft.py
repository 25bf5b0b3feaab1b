"""Supervised fine-tuning: imitate completions."""

from __future__ import annotations

from headway.contracts.config.experiment import SFTExperiment
from trainer.algorithms.losses import sft_loss
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.base import InterfaceContext
from trainer.interfaces.supervised import SupervisedInterface
from trainer.interfaces.updates import loss_tokens


class SFT:
    """The mean over the tokens of all answers."""

    granularity = 1

    def prepare(self, batch: SequenceBatch, mb_spec: MicroBatchSpec) -> SequenceBatch:
        return batch

    def loss(self, output: ModelOutput, batch: SequenceBatch) -> LossOutput:
        mask = batch["loss_mask"]
        return LossOutput(sft_loss(output.logprobs(batch["labels"], mask=mask), mask))

    def weight(self, batch: SequenceBatch) -> float:
        return loss_tokens(batch)


def make(context: InterfaceContext[SFTExperiment]) -> SupervisedInterface:
    """Build it as the experiment is configured."""
    return SupervisedInterface.of(SFT(), context)
