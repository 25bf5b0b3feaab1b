"""Direct preference optimisation: the policy itself is the reward model."""

from __future__ import annotations

from headway.contracts.config.experiment import DPOExperiment
from headway.contracts.config.preference import PreferenceConfig
from trainer.algorithms.preference import (
    pair_margins,
    pair_metrics,
    preference_loss,
    sequence_gains,
)
from trainer.algorithms.segments import Segments
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.base import InterfaceContext
from trainer.interfaces.reward_modeling import num_pairs
from trainer.interfaces.supervised import SupervisedInterface
from trainer.reference import Reference, make_reference


class DPO:
    """The mean over pairs of the preference loss, with a supervised term if asked for."""

    granularity = 2

    def __init__(self, config: PreferenceConfig, reference: Reference) -> None:
        self._config = config
        self._reference = reference

    def prepare(self, batch: SequenceBatch, mb_spec: MicroBatchSpec) -> SequenceBatch:
        return batch.with_columns(reference_logprobs=self._reference.logprobs(batch, mb_spec))

    def loss(self, output: ModelOutput, batch: SequenceBatch) -> LossOutput:
        config, mask = self._config, batch["loss_mask"]
        logprobs = output.logprobs(batch["labels"], mask=mask)
        sequences = Segments.of_lengths(batch.lengths, mask.device)
        gains = sequence_gains(logprobs, batch["reference_logprobs"], mask, sequences)
        margins = pair_margins(gains)
        loss = preference_loss(config, margins)
        metrics = pair_metrics(config.beta * gains)
        if config.sft_coef > 0:
            # Per answer, not per token: the mean over pairs stays that of any split.
            sft_loss = -sequences.means(logprobs, mask)[0::2].mean()
            loss = loss + config.sft_coef * sft_loss
            metrics["sft_loss"] = sft_loss.detach()
        return LossOutput(loss, metrics)

    def weight(self, batch: SequenceBatch) -> float:
        return num_pairs(batch)


def make(context: InterfaceContext[DPOExperiment]) -> SupervisedInterface:
    """Build it as the experiment is configured, with the reference that it names; collective."""
    config, engine = context.config, context.model
    reference = make_reference(config, engine, context.topology, context.meter)
    return SupervisedInterface.of(DPO(config.algorithm, reference), context)
