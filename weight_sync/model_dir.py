"""A Hugging Face model directory -> a model: what both ends start from, before any version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from headway.contracts.config.model import ModelConfig
from headway.contracts.errors import ConfigError

transformers_logging.disable_progress_bar()  # logs are lines; a bar rewrites them


def load_model(config: ModelConfig) -> Any:
    """The causal language model of a directory, or one of its kind with random weights.

    Raises:
        ConfigError: the directory is missing or holds no causal language model.
    """
    folder = Path(config.path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model directory (no config.json); set model.path")
    options = {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": config.attn_implementation,
    }
    try:
        if config.init_from_scratch:
            torch.manual_seed(config.seed)
            settings = AutoConfig.from_pretrained(folder, local_files_only=True)
            return AutoModelForCausalLM.from_config(settings, **options)
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load a causal language model from {folder}: {error}") from error
