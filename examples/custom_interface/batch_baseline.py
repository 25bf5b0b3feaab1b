"""Advantages of one's own: the score less the batch's mean, a little less for each sampled token."""

import torch

from trainer.algorithms.segments import Segments
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.base import Columns, InterfaceContext, register_interface


class BatchBaseline:
    """REINFORCE with the mean of the batch as baseline, and a price on length."""

    def __init__(self, context: InterfaceContext, cost_per_token: float = 0.0) -> None:
        self._cost = cost_per_token

    def inference(self, batch: SequenceBatch) -> Columns:
        """`advantages` [T] and `loss_mask` [T]; the batch is whole, and the same on every rank."""
        mask = batch["action_mask"]
        sizes = Segments.of_lengths(batch.lengths).sizes(mask)
        rewards = batch.per_sequence("scores").double() - self._cost * sizes
        gains = (rewards - rewards.mean()).float()
        advantages = gains.repeat_interleave(torch.tensor(batch.lengths))
        return {"advantages": torch.where(mask, advantages, 0.0), "loss_mask": mask}


register_interface("batch_baseline", BatchBaseline)
