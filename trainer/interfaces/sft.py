"""Supervised fine-tuning: imitate completions."""

from __future__ import annotations

from trainer.algorithms.losses import sft_loss
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.updates import loss_tokens


class SFT:
    """Trains on packed prompts and completions."""

    def __init__(self, engine: TrainEngine, mb_spec: MicroBatchSpec) -> None:
        self._engine = engine
        self._mb_spec = mb_spec

    def train_step(self, batch: SequenceBatch) -> dict[str, float]:
        """One optimizer step on this rank's share.

        Args:
            batch: columns `input_ids`, `labels`, `loss_mask` (both shifted to the predicted token).
        """
        return self._engine.train_batch(batch, self._mb_spec, _loss, loss_tokens)


def _loss(output: ModelOutput, batch: SequenceBatch) -> LossOutput:
    mask = batch["loss_mask"]
    return LossOutput(sft_loss(output.logprobs(batch["labels"], mask=mask), mask))
