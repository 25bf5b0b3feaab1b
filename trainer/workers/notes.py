"""Notes that a driver leaves in a batch's `meta`, and what is told when one is missing."""

from __future__ import annotations

from typing import Any

from headway.contracts.errors import DataError
from trainer.workers.dispatch import MINI_BATCH_SIZE, SHUFFLE_SEED
from trainer.workers.proto import DataProto

TEMPERATURE = "temperature"
"""What the policy sampled with; logprobs are those of the distribution that it divides."""
EPOCHS = "epochs"
"""Times that an update learns from each row; 1 unless noted."""
SAMPLING = "sampling"
"""A `SamplingConfig`, in place of the configured one."""

__all__ = ["EPOCHS", "MINI_BATCH_SIZE", "SAMPLING", "SHUFFLE_SEED", "TEMPERATURE", "noted"]


def noted(batch: DataProto, name: str, method: str) -> Any:
    """A note.

    Raises:
        DataError: it is missing.
    """
    if name not in batch.meta:
        raise DataError(f"{method} wants meta[{name!r}], and the batch notes {sorted(batch.meta)}")
    return batch.meta[name]
