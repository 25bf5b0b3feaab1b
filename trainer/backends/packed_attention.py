"""Causal attention over packed sequences, without a mask as wide as the pack.

The pack is cut into buckets of nearly equal length; each bucket is padded and runs as one causal
attention. A padded query is thrown away and, being on the right, a padded key is never read. So the
cost follows the sequences' own lengths, on any device, where a block mask over a pack of T tokens
costs T² whatever is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "headway_packed"
BUCKETS_PER_OCTAVE = 4
"""Lengths within a bucket differ by less than 2^(1/4): a tenth is padding on average."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the sequences of a pack lie, and where in the buckets; made once per micro-batch."""

    shapes: tuple[tuple[int, int], ...]
    """Per bucket: sequences, tokens of the longest."""
    sources: Tensor
    """[P] token of the pack at each place of the buckets, end to end; padding repeats a sequence's last
    one."""
    places: Tensor
    """[T] place of each token of the pack."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """The layout of sequences that lie end to end."""
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        length_class = (BUCKETS_PER_OCTAVE * torch.log2(sizes.double())).ceil()
        places = torch.empty(sum(lengths), dtype=torch.int64)
        shapes: list[tuple[int, int]] = []
        sources: list[Tensor] = []
        for value in length_class.unique():
            chosen = length_class == value
            column = torch.arange(int(sizes[chosen].max()))
            is_real = column < sizes[chosen, None]
            tokens = starts[chosen, None] + column.minimum(sizes[chosen, None] - 1)
            begin = sum(len(source) for source in sources)
            places[tokens[is_real]] = begin + is_real.flatten().nonzero().squeeze(1)
            shapes.append((tokens.shape[0], tokens.shape[1]))
            sources.append(tokens.flatten())
        return PackedLayout(tuple(shapes), torch.cat(sources).to(device), places.to(device))


class _ToBuckets(torch.autograd.Function):
    """[T, ...] -> [P, ...]. Causal attention gives padding no gradient, so none is to be added up."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return tokens.index_select(0, layout.sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.layout.places), None


class _FromBuckets(torch.autograd.Function):
    """[P, ...] -> [T, ...], without the padding."""

    @staticmethod
    def forward(ctx: Any, buckets: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return buckets.index_select(0, layout.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layout = ctx.layout
        whole = grad.new_zeros(len(layout.sources), *grad.shape[1:])
        return whole.index_copy_(0, layout.places, grad), None


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
    sizes = [count * length for count, length in packed_layout.shapes]
    columns = [
        torch.split(_ToBuckets.apply(tensor[0].transpose(0, 1), packed_layout), sizes)
        for tensor in (query, key, value)
    ]  # each [n · L, heads, head_dim] per bucket
    outputs = []
    for shape, *bucket in zip(packed_layout.shapes, *columns, strict=True):
        q, k, v = (column.unflatten(0, shape).transpose(1, 2) for column in bucket)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return _FromBuckets.apply(torch.cat(outputs), packed_layout)[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Packed attention needs none."""


def register() -> None:
    """Make the name known to transformers."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
