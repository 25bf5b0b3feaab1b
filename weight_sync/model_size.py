"""Size of a model, by its modules, before it has weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a decoder."""

    parameters: int
    """All, tied ones once."""
    largest_layer: int
    """Parameters of the largest layer."""
    around: int
    """Parameters outside of the layers: embeddings, head, last norm."""
    layers: int
    hidden: int
    """H: width of a hidden state."""
    queries: int
    """Heads · size of a head."""
    keys: int
    """The same of the keys, which are as wide as the values."""
    intermediate: int
    """Width within a layer's feed-forward part, of all experts that one token sees."""
    vocabulary: int
    max_context: int
    """Positions that the model knows."""

    @property
    def kv_width(self) -> int:
        """Numbers that one token leaves in the KV cache."""
        return 2 * self.layers * self.keys


def model_size(model: Any) -> ModelSize:
    """Measure a model of transformers, with parameters or without."""
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    layers = [_count(layer) for layer in decoder_layers(model)]
    total = _count(model)
    return ModelSize(
        parameters=total,
        largest_layer=max(layers, default=0),
        around=total - sum(layers),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        queries=heads * head_dim,
        keys=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        intermediate=_intermediate(text),
        vocabulary=text.vocab_size,
        max_context=text.max_position_embeddings,
    )


def adapter_parameters(model: torch.nn.Module, rank: int, targets: Sequence[str]) -> int:
    """Number of parameters of low-rank adapters on the linear layers whose names end so."""
    return sum(
        rank * (module.in_features + module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets
    )


def expert_routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the routers of a mixture of experts, in the order of its layers; none of a dense model.

    They are transformers' routers that return (logits [T, E], weights [T, K], experts [T, K]).
    """
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks."""
    stacks = [list(m) for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(stacks, key=len, default=[])


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _intermediate(text: Any) -> int:
    experts = getattr(text, "num_experts_per_tok", None)
    width = getattr(text, "moe_intermediate_size", None) if experts else None
    if experts and width:
        return int(experts * width)
    return int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
