"""Contents of a Hugging Face model directory, without loading it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from headway.contracts.errors import ConfigError
from headway.runtime.model_files import check_regular, read_object

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_OF_LAYER = re.compile(r".*\blayers\.(\d+)\..*\bexperts\.")
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


class ExpertCounts(NamedTuple):
    """Experts of a mixture."""

    num_experts: int
    """In a layer."""
    num_layers: int
    """All layers of the model, with and without experts."""
    top_k: int
    """Experts that compute a token, in a layer."""


def expert_counts(model: str) -> ExpertCounts | None:
    """Return the experts of a model directory; None of a dense model.

    Raises:
        ConfigError: it has no config.json, or that does not say how many experts compute a token.
    """
    config = read_model_config(model)
    found = next((int(config[name]) for name in _NUM_EXPERTS if config.get(name)), 0)
    if not found:
        return None
    top_k = config.get("num_experts_per_tok") or config.get("moe_topk")
    if not top_k:
        raise ConfigError(f"{model}/config.json has {found} experts and no num_experts_per_tok")
    return ExpertCounts(found, int(config["num_hidden_layers"]), int(top_k))


def expert_layers(model: str) -> tuple[int, ...]:
    """Return the indices of the layers with experts, in order; empty of a dense model.

    Raises:
        ConfigError: the directory holds no whole checkpoint.
    """
    counts = expert_counts(model)
    if counts is None:
        return ()
    matches = map(_EXPERTS_OF_LAYER.match, checkpoint_shapes(model))
    found = {int(match[1]) for match in matches if match}
    return tuple(sorted(layer for layer in found if layer < counts.num_layers))  # no draft layers


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
