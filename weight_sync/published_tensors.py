"""The trainer's parameters as they are published: renamed, cast, in buckets.

Everything is a pass over an iterator, so a sharded model is gathered one bucket at a time: a tensor
is asked for when its bucket is filled, and may be freed when the bucket was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from headway.contracts.config.weight_sync import PublishConfig
from headway.contracts.errors import ConfigError, SyncError
from weight_sync.channel import NamedTensors
from weight_sync.manifest import DTYPES

Bucket = list[tuple[str, torch.Tensor]]


def outgoing(tensors: NamedTensors, config: PublishConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Names as the servers know them, values in the published type, contiguous, on their device.

    Raises:
        SyncError: two parameters end up under one name, none is left, or one is no weight by its type.
    """
    dtype = None if config.dtype is None else DTYPES[config.dtype]
    skipped, seen = set(config.skip), dict[str, str]()
    for name, tensor in tensors:
        if name in skipped:
            continue
        new = renamed(name, config.rename)
        if new in seen:
            raise SyncError(
                f"{name} and {seen[new]} would both be published as {new}; change weight_sync.rename "
                "or name one of them in weight_sync.skip"
            )
        seen[new] = name
        value = tensor.detach() if dtype is None else tensor.detach().to(dtype)
        if value.dtype not in DTYPES.values():
            raise SyncError(
                f"{name} is of type {value.dtype}; versions hold {', '.join(DTYPES)}: set "
                "weight_sync.dtype, or name it in weight_sync.skip"
            )
        yield new, value.contiguous()
    if not seen:
        raise SyncError("a version needs tensors; publish the model's parameters")


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """The name that servers know: an exact match wins, then the longest prefix that ends in `*`.

    Raises:
        ConfigError: a prefix is mapped to something that is not one.
    """
    if name in rename:
        return rename[name]
    prefixes = [key for key in rename if key.endswith("*") and name.startswith(key[:-1])]
    if not prefixes:
        return name
    best = max(prefixes, key=len)
    if not rename[best].endswith("*"):
        raise ConfigError(f"weight_sync.rename maps {best} to {rename[best]}; end both in *")
    return rename[best][:-1] + name[len(best) - 1 :]


def buckets(tensors: NamedTensors, max_bytes: int) -> Iterator[Bucket]:
    """Consecutive tensors of up to `max_bytes` together; a larger one stands alone."""
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
