"""What all interfaces share: calls on a model that read columns of a batch by name, and give columns by
name, or figures."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trainer.batching.sequences import SequenceBatch

Columns = dict[str, Tensor]
"""Name -> [T] over a whole batch, the same on every rank."""


class Inference(Protocol):
    """A call that asks a model about a whole batch; collective."""

    def inference(self, batch: SequenceBatch) -> Columns:
        """New columns."""
