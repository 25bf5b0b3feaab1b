"""A train backend of one's own: FSDP2, but a batch whose loss jumps is not trained on."""

from typing import Any

from headway.contracts.config.trainer import TokenNormalizeScope
from trainer.api import LossFn, LossWeightFn, MicroBatchSpec
from trainer.backends.base import register_backend
from trainer.backends.fsdp2 import FSDP2Engine
from trainer.batching.sequences import SequenceBatch

JUMP = 3.0
"""A loss this many times as large as usual, in absolute value, is a jump."""


class CalmEngine(FSDP2Engine):
    """Looks at a batch before it learns from it: one forward pass more."""

    _usual: float | None = None

    def train_batch(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        token_normalize_scope: TokenNormalizeScope = "global",
    ) -> dict[str, float]:
        """Train like FSDP2; `skipped_steps` is 1 for a batch that was left out."""
        ask: tuple[Any, ...] = (input_, mb_spec, loss_fn, loss_weight_fn, token_normalize_scope)
        loss = abs(float(self.eval_batch(*ask)))
        if self._usual is not None and loss > JUMP * self._usual:
            return {"loss": loss, "skipped_steps": 1.0}
        self._usual = loss if self._usual is None else 0.9 * self._usual + 0.1 * loss
        return super().train_batch(*ask)


register_backend("calm", CalmEngine)
