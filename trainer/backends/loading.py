"""The model that a trainer starts from, with the head that it is asked for."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.errors import ConfigError
from weight_sync.model_dir import load_model, read_model

SCORE = "score"
"""The head of a sequence classification model; with one label, its weight is [1, H]."""


def load_trained_model(config: TrainedModelConfig) -> Any:
    """A causal language model, or its body with a scalar head: the stored one or a fresh one.

    Raises:
        ConfigError: the directory is missing, holds no such model, or not all of it.
    """
    if config.head == "lm":
        return load_model(config)
    model, missing = read_model(config, AutoModelForSequenceClassification, num_labels=1)
    head = getattr(model, SCORE, None)
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(
            f"{type(model).__name__} has no linear head named {SCORE}; train values on another "
            "architecture"
        )
    fresh = {f"{SCORE}.weight"}
    if missing - fresh:
        raise ConfigError(
            f"{config.path} does not hold {', '.join(sorted(missing - fresh)[:3])} of the model's "
            "body; set model.path to a whole one"
        )
    if missing or config.init_from_scratch:
        _begin(head, config.seed)
    return model


def _begin(head: torch.nn.Linear, seed: int) -> None:
    """Small values of either sign: N(0, 1 / (H + 1)), as in arXiv:2009.01325."""
    generator = torch.Generator().manual_seed(seed)
    std = 1.0 / math.sqrt(head.in_features + 1)
    torch.nn.init.normal_(head.weight, std=std, generator=generator)
