"""Named tensors: check that they fit a model and are finite, and compute their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from headway.contracts.errors import SyncError
from weight_sync.checkpoint import BUFFERS
from weight_sync.manifest import TensorEntry, dtype_name, tensor_checksum
from weight_sync.pieces import sum_of


def check_fit(
    shapes: Mapping[str, torch.Size],
    expected: Mapping[str, torch.Size],
    read: Callable[[str], torch.Tensor],
    origin: str,
) -> None:
    """Check that these are the tensors that a model expects, all of them and no others.

    A tied weight may come under both of its names (`lm_head.weight`): the second is no stranger if it
    equals a tensor that is expected. Nor are buffers that models compute (`BUFFERS`).

    Args:
        shapes: what came.
        expected: the model's parameters.
        read: brings one of the tensors that came; called for strangers and what they may equal.
        origin: for the message.

    Raises:
        SyncError: one is missing, unknown, or of another shape.
    """

    def is_copy(name: str) -> bool:
        likely = [other for other in expected if shapes.get(other) == shapes[name]]
        return any(_is_equal(read(name), read(other)) for other in likely)

    missing = sorted(expected.keys() - shapes.keys())
    extra = sorted(
        name
        for name in shapes.keys() - expected.keys()
        if not name.endswith(BUFFERS) and not is_copy(name)
    )
    others = [
        f"{name}: {tuple(shapes[name])} given, {tuple(shape)} in the model"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if missing or extra or others:
        raise SyncError(
            f"{origin} is of another model: missing {missing[:3]}, extra {extra[:3]}, shapes {others[:3]}"
        )


def check_finite(tensors: Sequence[tuple[str, torch.Tensor]], origin: str) -> None:
    """Check that no value is NaN or infinite.

    A sum shows both, in one pass and with one wait for a GPU. It may overflow, so others are looked at.

    Args:
        origin: for the message.

    Raises:
        SyncError: a tensor holds such values.
    """
    sums = [sum_of(tensor).float() for _, tensor in tensors]
    if not sums or torch.stack(sums).isfinite().all():
        return
    for name, tensor in tensors:
        num_wrong = int((~tensor.float().isfinite()).sum())
        if num_wrong:
            raise SyncError(
                f"{origin}: {num_wrong} of {tensor.numel()} values of {name} are NaN or infinite, which "
                "no server may serve; go back to a checkpoint and look at the loss and learning rate"
            )


def entry_in_memory(name: str, tensor: torch.Tensor) -> TensorEntry:
    """The entry of a finite tensor on the CPU that is stored nowhere.

    Raises:
        SyncError: a type that versions cannot hold.
    """
    return TensorEntry(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        checksum=tensor_checksum(tensor),
        blob="memory",
        size=tensor.nbytes,
        is_finite=True,
    )


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Equal digests mean equal names, types, shapes and bytes.

    Raises:
        SyncError: a type that versions cannot hold.
    """
    return digest_of(digest_row(name, tensor) for name, tensor in tensors.items())


def digest_of(rows: Iterable[Sequence[Any]]) -> str:
    """`weights_digest` of tensors that are gone; only their rows are left."""
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()


def digest_row(name: str, tensor: torch.Tensor) -> list[Any]:
    """What a tensor adds to the digest."""
    return [name, list(tensor.shape), dtype_name(tensor.dtype), tensor_checksum(tensor.cpu())]


def _is_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(tensor.to(other), other)
