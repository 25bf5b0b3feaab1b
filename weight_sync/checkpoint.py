"""What a Hugging Face model directory holds, without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headway.contracts.errors import ConfigError

BUFFERS = (".rotary_emb.inv_freq",)
"""What old checkpoints store although it is computed, and no version holds."""


def read_model_config(model: str) -> dict[str, Any]:
    """`config.json`; of a model with several parts, the part that speaks.

    Raises:
        ConfigError: there is none.
    """
    file = Path(model) / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no model configuration ({error}); set model.path") from error
    text: dict[str, Any] = config.get("text_config", config)
    return text


def checkpoint_shapes(model: str) -> dict[str, torch.Size]:
    """Names and shapes of the parameters, which every version of this model has to hold.

    Raises:
        ConfigError: the directory is missing or damaged.
    """
    shapes: dict[str, torch.Size] = {}
    try:
        for shard in sorted(Path(model).glob("*.safetensors")):
            with safe_open(shard, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - a file, not a mapping
                    shapes[name] = torch.Size(file.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the parameters of {model}: {error}") from error
    if read_model_config(model).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)  # some checkpoints hold it twice, versions do not
    return {name: shape for name, shape in shapes.items() if not name.endswith(BUFFERS)}
