"""Random models for runs whose numbers are not looked at, but their speed and their agreement."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headway.launch.quickstart import task

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {},
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "max_position_embeddings": 4096,
    },
}
"""Changes to the quick start's model; `1.5b` is as large as Qwen2.5-1.5B."""


def write_model(folder: Path, size: str) -> None:
    """A model with its tokenizer, in bfloat16."""
    task.write_model(folder, SHAPES[size])
    config = AutoConfig.from_pretrained(folder)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a CPU takes a minute
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
