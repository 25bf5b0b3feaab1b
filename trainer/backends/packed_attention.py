"""Causal attention over packed sequences, without a mask as wide as the pack.

On a GPU, halves run through PyTorch's kernel for sequences of any lengths (`varlen_attn`): one launch
whatever the lengths are. Elsewhere the pack is split into buckets of nearly equal length; each bucket is
padded and runs as one causal attention. A padded query is thrown away and, being on the right, a padded
key is never read. Both ways cost what the sequences' own lengths cost, where a block mask over a pack of
T tokens costs T² whatever is in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trainer.transfer import to_device

NAME = "headway_packed"
UNCOMPILED_NAME = "headway_packed_uncompiled"
BUCKETS_PER_OCTAVE = 4
"""Lengths within a bucket differ by less than 2^(1/4): a tenth is padding on average."""
HALVES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
"""Largest head dimension of FlashAttention; it also has to be a multiple of 8."""
FLASH_CAPABILITY = (8, 0)
"""Ampere: the first devices that FlashAttention runs on."""
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""cuDNN makes a plan for every shape, a tenth of a second each, and buckets have many."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sequences of a pack by length, each bucket padded to its longest."""

    shapes: tuple[tuple[int, int], ...]
    """For each bucket: number of sequences, tokens of the longest."""
    sources: Tensor
    """[P] token of the pack at each slot of the buckets, end to end; padding repeats a sequence's last
    one."""
    places: Tensor
    """[T] slot of each token of the pack."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Buckets:
        """Build the buckets of sequences that are packed end to end."""
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
        whole = torch.cat(sources)
        return Buckets(tuple(shapes), to_device(whole, device), to_device(places, device))


class PackedLayout:
    """Positions of the sequences of a pack; one per micro-batch.

    What a kernel needs of it is made when the first layer asks, and kept for the others.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        self._device = device

    @cached_property
    def buckets(self) -> Buckets:
        """Buckets by length, on the device."""
        return Buckets.of(self.lengths, self._device)

    @cached_property
    def offsets(self) -> Tensor:
        """[N + 1] int32 first token of each sequence, then T; on the device."""
        starts = torch.tensor((0, *accumulate(self.lengths)), dtype=torch.int32)
        return to_device(starts, self._device)


class _ToBuckets(torch.autograd.Function):
    """[T, ...] -> [P, ...]. Causal attention gives padding no gradient, so none is to be added up."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, buckets: Buckets) -> Tensor:
        ctx.buckets = buckets
        return tokens.index_select(0, buckets.sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.buckets.places), None


class _FromBuckets(torch.autograd.Function):
    """[P, ...] -> [T, ...], without the padding."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, buckets: Buckets) -> Tensor:
        ctx.buckets = buckets
        return padded.index_select(0, buckets.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        buckets = ctx.buckets
        whole = grad.new_zeros(len(buckets.sources), *grad.shape[1:])
        return whole.index_copy_(0, buckets.places, grad), None


def can_pack(model: Any) -> bool:
    """True if the model passes keyword arguments to its attention, and uses full attention in every
    layer.
    """
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
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, head_dim]
    attend = in_one_call if takes_varlen(query) else in_buckets
    return attend(q, k, v, packed_layout, scaling)[None], None


def takes_varlen(query: Tensor) -> bool:
    """True if the kernel for sequences of different lengths runs on such a tensor [..., head_dim]
    here.
    """
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in HALVES
        and head_dim % 8 == 0
        and head_dim <= MAX_HEAD_DIM
        and has_flash(query.device)
        and _varlen_kernel() is not None
    )


@cache
def has_flash(device: torch.device) -> bool:
    """True if FlashAttention runs on this GPU."""
    return (
        torch.version.hip is None and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY
    )


@cache
def _varlen_kernel() -> Callable[..., Any] | None:
    """`varlen_attn`; None where this PyTorch has none that takes grouped heads."""
    try:
        # It loads PyTorch's compiler, for seconds.
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"enable_gqa", "window_size", "scale"} <= known.keys() else None


def in_one_call(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None
) -> Tensor:
    """Attend within each sequence by one launch.

    Args:
        query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim].
    Returns:
        [T, heads, head_dim].
    """
    attend = _varlen_kernel()
    assert attend is not None
    ends, longest = layout.offsets, max(layout.lengths)
    output: Tensor = attend(
        query,
        key,
        value,
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),  # causal
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def in_buckets(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None
) -> Tensor:
    """Attend within each sequence by one launch per bucket; as `in_one_call`."""
    buckets = layout.buckets
    repeats = query.shape[1] // key.shape[1]
    sizes = [count * length for count, length in buckets.shapes]
    columns = [
        torch.split(_ToBuckets.apply(tensor, buckets), sizes) for tensor in (query, key, value)
    ]  # each [n · L, heads, head_dim] per bucket
    outputs = []
    with _few_plans(query):
        for shape, *bucket in zip(buckets.shapes, *columns, strict=True):
            q, k, v = (column.unflatten(0, shape).transpose(1, 2) for column in bucket)
            if repeats > 1:
                k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
            output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
    return _FromBuckets.apply(torch.cat(outputs), buckets)


def _few_plans(query: Tensor) -> AbstractContextManager[None]:
    return sdpa_kernel(WITHOUT_CUDNN) if query.is_cuda else nullcontext()


def register() -> None:
    """Make the name known to transformers: as an attention that wants no mask, which it then does not
    look for in the position ids."""
    AttentionInterface.register(NAME, packed_attention)


def register_uncompiled() -> None:
    """The same for compiled blocks, which call it as it is: every micro-batch has another layout."""
    AttentionInterface.register(UNCOMPILED_NAME, torch.compiler.disable(packed_attention))
