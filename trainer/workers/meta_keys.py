"""Keys of the values that a driver puts into a batch's `meta`, and the error when one is missing."""

from __future__ import annotations

from typing import Any

from headway.contracts.errors import DataError
from trainer.workers.data_proto import DataProto
from trainer.workers.dispatch import MINI_BATCH_SIZE, SHUFFLE_SEED

TEMPERATURE = "temperature"
"""Sampling temperature of the policy; logprobs are those of the distribution divided by it."""
EPOCHS = "epochs"
"""Number of times that an update learns from each row; default 1."""
SAMPLING = "sampling"
"""A `SamplingConfig`, in place of the configured one."""

__all__ = ["EPOCHS", "MINI_BATCH_SIZE", "SAMPLING", "SHUFFLE_SEED", "TEMPERATURE", "meta_value"]


def meta_value(batch: DataProto, name: str, method: str) -> Any:
    """Return a value of `meta`.

    Raises:
        DataError: it is missing.
    """
    if name not in batch.meta:
        raise DataError(f"{method} wants meta[{name!r}], and the batch has {sorted(batch.meta)}")
    return batch.meta[name]
