"""Random adapters as `peft` writes them, and the slow models with one merged in."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from tests.numeric.models import load_reference

SPREAD = 0.3
"""Of both halves: `peft` begins with B = 0."""


def save_adapter(
    folder: Path, model_dir: Path, seed: int, spread: float = SPREAD, **lora: Any
) -> Path:
    """Write an adapter of a model directory."""
    torch.manual_seed(seed)
    config = LoraConfig(task_type="CAUSAL_LM", **lora)
    with _deprecations_of_peft():
        model = get_peft_model(load_reference(model_dir), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=spread)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def merged_reference(model_dir: Path, adapter: Path | None) -> nn.Module:
    """The model with an adapter merged in by `peft`, in float64; without one, the model."""
    return merged(load_reference(model_dir), adapter)


def merged(model: nn.Module, adapter: Path | None) -> nn.Module:
    """Likewise, of a model that is at hand; it is changed."""
    model = model.double()
    if adapter is not None:
        with _deprecations_of_peft():
            model = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
        model = model.merge_and_unload()
    return model.double().eval()


@contextmanager
def _deprecations_of_peft() -> Iterator[None]:
    with warnings.catch_warnings():
        text = "`is_gradient_checkpointing` is deprecated"  # read by peft 0.21
        warnings.filterwarnings("ignore", text, FutureWarning)
        yield
