"""Decoder layers of Llama and its kin on the CPU: norms and rotations in fewer passes over memory.

Outside of its products a training step on a CPU is bound by memory, and autograd keeps and reads again
what each elementwise call made. Here a norm and a rotation are one node each, with a derivative of its
own. Parameters, and the modules that hold them, stay: adapters and sharding do not notice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.backends.packed_attention import packed_attention

LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Classes of transformers that compute what this file does."""


def fuse_layers(layers: Iterable[nn.Module]) -> None:
    """Have those layers that this file knows compute as here; they attend within packed sequences."""
    for layer in layers:
        kind = type(layer)
        if kind.__name__ in LAYERS and kind.__module__.startswith("transformers.models."):
            known: Any = layer
            known.self_attn.forward = _Attention(known.self_attn)
            known.input_layernorm.forward = _Norm(known.input_layernorm)
            known.post_attention_layernorm.forward = _Norm(known.post_attention_layernorm)


class _Norm:
    """The forward of a root mean square norm."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self._module.weight
        if hidden_states.dtype != torch.float32 or weight.dtype != torch.float32:
            plain: Tensor = type(self._module).forward(self._module, hidden_states)
            return plain
        normed: Tensor = _RMSNorm.apply(hidden_states, weight, self._module.variance_epsilon)
        return normed


class _Attention:
    """The forward of an attention module."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        module, cos_sin = self._module, [part.unsqueeze(2) for part in position_embeddings]
        shape = (*hidden_states.shape[:-1], -1, module.head_dim)  # [1, T, heads, head_dim]
        queries = module.q_proj(hidden_states).view(shape)
        keys = module.k_proj(hidden_states).view(shape)
        values = module.v_proj(hidden_states).view(shape)
        if hasattr(module, "q_norm"):
            queries, keys = module.q_norm(queries), module.k_norm(keys)
        mixed, _ = packed_attention(
            module,
            _Rotation.apply(queries, *cos_sin).transpose(1, 2),
            _Rotation.apply(keys, *cos_sin).transpose(1, 2),
            values.transpose(1, 2),
            scaling=module.scaling,
            **{"attention_mask": None, **kwargs},
        )
        return module.o_proj(mixed.flatten(2)), None


class _RMSNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, factor)
        return (x * factor).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factor = ctx.saved_tensors
        normed = x * factor
        slopes = grad * normed
        share = (slopes @ weight).div_(x.shape[-1]).unsqueeze(-1)
        x_grad = (grad * weight).addcmul_(normed, share, value=-1.0).mul_(factor)
        return x_grad, slopes.flatten(0, -2).sum(0), None


class _Rotation(torch.autograd.Function):
    """Turn the halves of each head by the angle of its position."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(heads, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1.0), None, None


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """By `sin`, or back.

    Args:
        heads: [..., heads, head_dim].
        cos, sin: [..., 1, head_dim], both halves alike.
    """
    turned = heads * cos
    first, second = heads.chunk(2, dim=-1)
    into_first, into_second = turned.chunk(2, dim=-1)
    half = sin[..., : first.shape[-1]]
    into_first.addcmul_(second, half, value=-sign)
    into_second.addcmul_(first, half, value=sign)
    return turned
