"""A Hugging Face model directory -> a model for inference."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headway.contracts.config.model import ModelConfig
from headway.contracts.errors import ConfigError


def load_model(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """Load weights (or draw them) in evaluation mode, without gradients.

    Raises:
        ConfigError: the directory is missing or holds no causal language model.
    """
    folder = Path(config.path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model directory (no config.json); set model.path")
    dtype = getattr(torch, config.dtype)
    options = {"dtype": dtype, "attn_implementation": config.attn_implementation}
    try:
        if config.init_from_scratch:
            torch.manual_seed(config.seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load a causal language model from {folder}: {error}") from error
    model.to(device).eval().requires_grad_(False)
    return model
