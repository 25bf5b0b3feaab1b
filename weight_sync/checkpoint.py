"""Contents of a Hugging Face model directory, without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headway.contracts.errors import ConfigError
from headway.runtime.model_files import check_regular, read_object

BUFFERS = (".rotary_emb.inv_freq",)
"""Suffixes of buffers that old checkpoints store although they are computed; no version contains them.
"""


def read_model_config(model: str) -> dict[str, Any]:
    """`config.json`; of a model with several parts, the part that speaks.

    Raises:
        ConfigError: there is none.
    """
    file = Path(model) / "config.json"
    if not file.exists():
        raise ConfigError(f"{model} is not a model directory (no config.json); set model.path")
    config = read_object(file)
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ConfigError(f"text_config in {model}/config.json is no object")
    return text


def checkpoint_shapes(model: str) -> dict[str, torch.Size]:
    """Names and shapes of the parameters, which every version of this model has to hold.

    Raises:
        ConfigError: the directory is missing or damaged.
    """
    shapes: dict[str, torch.Size] = {}
    try:
        for shard in sorted(Path(model).glob("*.safetensors")):
            check_regular(shard)
            with safe_open(shard, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - a file, not a mapping
                    shapes[name] = torch.Size(file.get_slice(name).get_shape())
    except (OSError, OverflowError, RuntimeError, TypeError, SafetensorError) as error:
        raise ConfigError(f"cannot read the parameters of {model}: {error}") from error
    if read_model_config(model).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)  # some checkpoints hold it twice, versions do not
    return {name: shape for name, shape in shapes.items() if not name.endswith(BUFFERS)}
