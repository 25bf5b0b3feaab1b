"""A tiny model for suites that backends have to pass, and versions of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from weight_sync.checkpoint_names import CheckpointNames
from weight_sync.model_dir import MAKING_MODELS

VOCAB_SIZE = 61
"""Tokens of the model; 0 begins a sequence and 1 ends it."""
CONTEXT = 2048
"""Tokens per sequence."""


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write a Llama of 2 layers with random weights, float32, without a tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,  # with 0.02 all tokens are nearly equally likely
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def other_weights(folder: Path, factor: float) -> Iterator[tuple[str, Tensor]]:
    """Yield a model directory's weights times `factor`, for a version that samples differently."""
    with MAKING_MODELS:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    for name, weight in CheckpointNames(model).split(model.named_parameters()):
        yield name, weight.detach() * factor
