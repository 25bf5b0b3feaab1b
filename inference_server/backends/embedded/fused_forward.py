"""The forward of Llama and its kin on the CPU, in few calls.

A decode step of a small model computes less than it calls: transformers' modules take some seventy calls
a layer. Here query, key and value are one product, gate and up another, and both rotations one. What is
computed is the same; products side by side, and norms of PyTorch's own, round as those of the modules do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm

from inference_server.backends.embedded.attention import Step
from inference_server.backends.embedded.packed_linear import (
    PackedProducts,
    Product,
    parameter_names,
)

MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes of transformers that compute what this file does."""


def can_fuse(model: nn.Module) -> bool:
    """Whether this file computes what the model does."""
    kind = type(model)
    return kind.__name__ in MODELS and kind.__module__.startswith("transformers.models.")


def fuse(model: Any) -> PackedProducts:
    """Have a model compute as here, with packed weights, when the engine calls it."""
    forward = _Forward(model)
    model.forward = forward
    return PackedProducts(forward.products, model)


@dataclass(frozen=True, slots=True)
class _Output:
    logits: Tensor
    """[1, w, V]."""


class _Forward:
    """A whole model; parameters that are no product's are read where they are."""

    def __init__(self, model: Any) -> None:
        names = parameter_names(model)
        base = model.model
        self._embedding = base.embed_tokens.weight
        self._rotation = base.rotary_emb
        self._layers = [_Layer(layer, names) for layer in base.layers]
        self._norm = _FusedNorm(base.norm)
        self._head = Product([model.lm_head], names)
        self.products = [p for layer in self._layers for p in layer.products] + [self._head]

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        use_cache: bool,
        step: Step,
    ) -> _Output:
        """As `forward` of the model, for what `EmbeddedModel.forward` asks."""
        hidden = embedding(input_ids, self._embedding)
        rotation = _FusedRotation.of(*self._rotation(hidden, position_ids))
        hidden = hidden[0]
        for layer in self._layers:
            hidden = layer(hidden, rotation, step)
        return _Output(self._head(self._norm(hidden[logits_to_keep]))[None])


class _FusedRotation:
    """The rotation of queries and keys at the positions of a step."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """
        Args:
            cos, sin: [T, 1, head_dim]; the first half of `sin` is negated.
        """
        self._cos, self._sin = cos, sin
        self._half = cos.shape[-1] // 2

    @staticmethod
    def of(cos: Tensor, sin: Tensor) -> _FusedRotation:
        """From those of transformers, [1, T, head_dim] each."""
        first, second = sin[0].chunk(2, dim=-1)
        return _FusedRotation(cos[0][:, None], torch.cat((-first, second), dim=-1)[:, None])

    def __call__(self, heads: Tensor) -> Tensor:
        """[T, heads, head_dim] -> the same, rotated."""
        return heads * self._cos + heads.roll(self._half, -1) * self._sin


class _FusedNorm:
    """Root mean square norm."""

    def __init__(self, module: Any) -> None:
        self._weight = module.weight
        self._eps = module.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        if x.dtype == torch.float32:
            return rms_norm(x, self._weight.shape, self._weight, self._eps)
        wide = x.float()  # rounded before the weight, as in the modules
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return cast(Tensor, self._weight * wide.to(x.dtype))


class _Layer:
    """A decoder layer."""

    def __init__(self, layer: Any, names: dict[int, str]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index: int = attention.layer_idx
        self._scale: float = attention.scaling
        self._window: int | None = getattr(attention, "sliding_window", None)
        self._head_dim: int = attention.head_dim
        self._num_heads = attention.q_proj.out_features // attention.head_dim
        self._num_rotated = self._num_heads + attention.k_proj.out_features // attention.head_dim
        self._norm = _FusedNorm(layer.input_layernorm)
        self._norms = (
            [_FusedNorm(attention.q_norm), _FusedNorm(attention.k_norm)]
            if hasattr(attention, "q_norm")
            else []
        )
        self._mlp_norm = _FusedNorm(layer.post_attention_layernorm)
        self._activation = mlp.act_fn
        self._qkv = Product([attention.q_proj, attention.k_proj, attention.v_proj], names)
        self._output = Product([attention.o_proj], names)
        self._gate_up = Product([mlp.gate_proj, mlp.up_proj], names)
        self._down = Product([mlp.down_proj], names)
        self.products = [self._qkv, self._output, self._gate_up, self._down]

    def __call__(self, hidden: Tensor, rotation: _FusedRotation, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        hidden = hidden + self._attention(self._norm(hidden), rotation, step)
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self._down(self._activation(gate).mul_(up))

    def _attention(self, x: Tensor, rotation: _FusedRotation, step: Step) -> Tensor:
        heads = self._qkv(x).view(len(x), -1, self._head_dim)
        rotated, values = heads[:, : self._num_rotated], heads[:, self._num_rotated :]
        if self._norms:
            queries, keys = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
            rotated = torch.cat((self._norms[0](queries), self._norms[1](keys)), dim=1)
        rotated = rotation(rotated)
        queries, keys = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        mixed = step.attend(self._index, queries, keys, values, self._scale, self._window)
        return self._output(mixed.reshape(len(x), -1))
