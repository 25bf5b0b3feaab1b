"""A model's update with a loss of one's own: tokens that are predicted well count less."""

from typing import Any

from trainer.api import LossOutput, ModelOutput
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.base import InterfaceContext, Metrics, register_interface


class FocalLoss:
    """Imitates answers by the focal loss, -(1 - p)^gamma · log p (arXiv:1708.02002)."""

    def __init__(self, context: InterfaceContext[Any], gamma: float = 2.0) -> None:
        self._context = context
        self._gamma = gamma

    def train_step(self, share: SequenceBatch) -> Metrics:
        """One optimizer step on this rank's share of the rows; collective."""
        context = self._context
        scope = context.token_normalize_scope
        return context.model.train_batch(share, context.mb_spec, self._loss, self._weight, scope)

    def evaluate(self, share: SequenceBatch) -> Metrics:
        """The loss of held-out rows."""
        context = self._context
        loss = context.model.eval_batch(share, context.mb_spec, self._loss, self._weight)
        return {"loss": float(loss)}

    def _loss(self, output: ModelOutput, batch: SequenceBatch) -> LossOutput:
        mask = batch["loss_mask"]
        logprobs = output.logprobs(batch["labels"], mask=mask)
        surprise = (1.0 - logprobs.exp()) ** self._gamma
        mean = -(surprise * logprobs).sum() / mask.sum().clamp(min=1)
        return LossOutput(mean, {"surprise": (surprise * mask).sum() / mask.sum().clamp(min=1)})

    def _weight(self, batch: SequenceBatch) -> float:
        return float(batch["loss_mask"].sum())


register_interface("focal_loss", FocalLoss)
