"""Causal attention over packed sequences, without a mask as wide as the pack.

The pack is cut into buckets of similar length (powers of two); each bucket is padded and runs as one
causal attention. A padded query is thrown away and, being on the right, a padded key is never read.
So the cost follows the sequences' own lengths, on any device, where a block mask over a pack of T
tokens costs T² whatever is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "headway_packed"


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the sequences of a pack lie; made once per micro-batch."""

    buckets: tuple[tuple[Tensor, Tensor], ...]
    """Per bucket: [n, L] token positions (padding repeats the last one), [n, L] bool real tokens."""
    order: Tensor
    """[T] puts the buckets' real tokens, end to end, back into the order of the pack."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """The layout of sequences that lie end to end."""
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        width_class = torch.log2(sizes.double()).ceil().long()
        buckets, tokens = [], []
        for value in width_class.unique():
            chosen = width_class == value
            column = torch.arange(int(sizes[chosen].max()))
            is_real = column[None, :] < sizes[chosen, None]
            positions = starts[chosen, None] + column.minimum(sizes[chosen, None] - 1)
            buckets.append((positions.to(device), is_real.to(device)))
            tokens.append(positions[is_real])
        return PackedLayout(tuple(buckets), torch.cat(tokens).argsort().to(device))


def can_pack(model: Any) -> bool:
    """Whether the model hands keyword arguments to its attention, and attends fully in every layer."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and kinds == {"full_attention"}
        and getattr(config, "attn_logit_softcapping", None) is None
    )


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers.

    Args:
        query: [1, heads, T, head_dim]; key, value: [1, kv_heads, T, head_dim].
        attention_mask: not used.
        packed_layout: given to the model's forward by the engine.
    Returns:
        [1, T, heads, head_dim].
    """
    if packed_layout is None:
        raise RuntimeError("packed attention needs packed_layout; the model did not pass it on")
    repeats = query.shape[1] // key.shape[1]
    columns = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [T, heads, head_dim]
    outputs = []
    for positions, is_real in packed_layout.buckets:
        q, k, v = (
            column[positions].transpose(1, 2) for column in columns
        )  # [n, heads, L, head_dim]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        outputs.append(output.transpose(1, 2)[is_real])
    return torch.cat(outputs)[packed_layout.order][None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Packed attention needs none."""


def register() -> None:
    """Make the name known to transformers."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
