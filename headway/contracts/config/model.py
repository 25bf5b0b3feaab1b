"""The model, and how it is held in memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.contracts.config.base import Config

Device = Literal["auto", "cuda", "cpu"]
"""Device on which a process computes. `auto`: its GPU, or the CPU of a machine that has none."""


class ModelConfig(Config):
    path: str = Field(min_length=1)
    """Directory of a Hugging Face causal language model (config.json, *.safetensors, tokenizer.json)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the parameters in memory. `auto` is bfloat16 on the GPU of a generation server, and float32
    elsewhere."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention kernel of transformers."""
    init_from_scratch: bool = False
    """Random weights from config.json instead of the stored ones."""
    seed: int = Field(0, ge=0)
    """Seed of random weights."""


class RankModelConfig(ModelConfig):
    """A model that the ranks of a trainer hold."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the parameters in memory; `trainer.compute_dtype` is that of the passes."""


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


class TrainedModelConfig(RankModelConfig):
    """Further model settings of a trainer."""

    head: Literal["lm", "value"] = "lm"
    """`lm` predicts tokens; `value` gives one number per position (critic, reward model): stored as a
    sequence classification model with one label, or random on the body of a language model."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora: LoraConfig | None = None
    """Train adapters; None trains all parameters."""
