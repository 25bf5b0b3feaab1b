"""Attention of one step over the KV cache, behind transformers' attention interface.

A step packs the next tokens of many sequences into one row `[1, T]`: the last token of each sequence
that decodes, and chunks of prompts. Every layer but attention works on tokens alone; attention asks the
step, which knows where the tokens are in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from headway.contracts.errors import ConfigError
from inference_server.backends.embedded.kv_cache import CacheRow

NAME = "headway_rows"


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, end)` of the sequence in `row`, at `[first, first + end - start)` of the step."""

    row: CacheRow
    start: int
    end: int
    first: int


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step, as the scheduler lists them."""

    ids: Sequence[int]
    """[T] tokens."""
    positions: Sequence[int]
    """[T] where each stands in its sequence."""
    wanted: Sequence[int]
    """[w] places in the step whose logits are wanted."""
    spans: Sequence[Span]
    """[n] where the tokens are in the cache, in the order of the step."""
    uniforms: Sequence[float]
    """[m] points at which tokens will be drawn."""
    targets: Sequence[int] = ()
    """[S] tokens that the first logits are to score."""


class Step(Protocol):
    """Positions in the cache of the tokens of one forward pass; made once, used by every layer."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Write the new keys and values, then read.

        Args:
            q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim].
            window: a query reads this many positions, its own included; None reads all.
        Returns:
            [T, heads, head_dim].
        """


def cached_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    step: Step | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers.

    Args:
        query: [1, heads, T, head_dim]; key, value: [1, kv_heads, T, head_dim].
        attention_mask: not used.
        step: given to the model's forward by the engine.
        sliding_window: a query reads this many positions, its own included; None reads all.
    Returns:
        [1, T, heads, head_dim].
    Raises:
        ConfigError: the model wants a kind of attention that is not built here.
    """
    if step is None or softcap is not None or s_aux is not None:
        raise ConfigError(
            f"{type(module).__name__} does not fit the embedded torch backend (step passed on: "
            f"{step is not None}, softcap: {softcap}, sinks: {s_aux is not None}); "
            "use backend.type: sglang"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, head_dim]
    return step.attend(layer, q, k, v, scale, sliding_window)[None], None


def register() -> None:
    """Make the name known to transformers.

    It has no function for masks: transformers then makes none, and does not look at positions for packed
    sequences either, for which the host would wait in every step.
    """
    AttentionInterface.register(NAME, cached_attention)
