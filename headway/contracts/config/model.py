"""Which model, and how it is held in memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.contracts.config.base import Config


class ModelConfig(Config):
    path: str = Field(min_length=1)
    """Directory of a Hugging Face causal language model (config.json, *.safetensors, tokenizer.json)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the parameters in memory."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention kernel of transformers."""
    init_from_scratch: bool = False
    """Random weights from config.json instead of the stored ones."""
    seed: int = Field(0, ge=0)
    """Seed of random weights."""


class LoraConfig(Config):
    """Low-rank adapters (arXiv:2106.09685), and nothing else, are trained."""

    rank: int = Field(16, ge=1)
    """Columns of B, rows of A."""
    alpha: int = Field(32, ge=1)
    """Adapters are scaled by alpha / rank."""
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Linear layers that get one, by the ends of their names."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the adapters' inputs that a training pass drops; other passes drop nothing."""


class TrainedModelConfig(ModelConfig):
    """What a trainer asks for besides."""

    head: Literal["lm", "value"] = "lm"
    """`lm` predicts tokens; `value` gives one number per position (critic, reward model): stored as a
    sequence classification model with one label, or random on the body of a language model."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora: LoraConfig | None = None
    """Train adapters; None trains all parameters."""
