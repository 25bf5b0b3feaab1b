"""Named tensors that came from elsewhere: do they fit a model, and what is their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from headway.contracts.errors import SyncError
from weight_sync.manifest import dtype_name, tensor_sha256

COMPUTED = "rotary_emb.inv_freq"
"""Old checkpoints store this buffer; models compute it."""


def fit_tensors(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size], origin: str
) -> dict[str, torch.Tensor]:
    """The tensors that a model expects, all of them and no other.

    A tied weight may come under both of its names (`lm_head.weight`): the second is left out if it
    equals a tensor that is expected. So are buffers that models compute (`COMPUTED`).

    Raises:
        SyncError: one is missing, unknown, or of another shape.
    """
    missing = sorted(expected.keys() - tensors.keys())
    extra = sorted(
        name
        for name in tensors.keys() - expected.keys()
        if not name.endswith(COMPUTED) and not _is_copy(tensors[name], tensors, expected)
    )
    shapes = [
        f"{name}: {tuple(tensors[name].shape)} given, {tuple(shape)} in the model"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if missing or extra or shapes:
        raise SyncError(
            f"{origin} is of another model: missing {missing[:3]}, extra {extra[:3]}, shapes {shapes[:3]}"
        )
    return {name: tensors[name] for name in expected}


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Equal digests mean equal names, types, shapes and bytes.

    Raises:
        SyncError: a type that versions cannot hold.
    """
    rows = [
        [name, list(tensor.shape), dtype_name(tensor.dtype), tensor_sha256(tensor.cpu())]
        for name, tensor in sorted(tensors.items())
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _is_copy(
    tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size]
) -> bool:
    return any(
        tensors[name].shape == tensor.shape and torch.equal(tensors[name], tensor)
        for name in expected
        if name in tensors
    )
