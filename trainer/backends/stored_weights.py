"""The files of a Hugging Face model directory, read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from headway.contracts.errors import ConfigError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def find_weights(
    model: Any, folder: Path, optional: set[str]
) -> dict[str, Callable[[], Tensor]] | None:
    """Return a function that reads each parameter of a model; None if the files name or shape them
    otherwise.

    Args:
        optional: names that may be missing.
    Raises:
        ConfigError: a file is missing or damaged.
    """
    stored = list_tensors(folder)
    conversions = get_model_conversion_mapping(model)
    if not stored or any(isinstance(one, WeightConverter) for one in conversions):
        return None
    parameters = dict(model.named_parameters())
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Callable[[], Tensor]] = {}
    for key, (file, shape) in stored.items():
        name = _name_of(key, every, model.base_model_prefix)
        if name is None:
            continue  # of another head
        if name not in parameters or shape != list(parameters[name].shape):
            return None  # tied in the model, but not in the files; or of another shape
        found[name] = partial(_read, file, key)
    return None if parameters.keys() - found.keys() - optional else found


def list_tensors(folder: Path) -> dict[str, tuple[Path, list[int]]]:
    """Key -> file and shape; empty if the directory has no such files.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    stored = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 # no mapping
                    stored[key] = file, list(tensors.get_slice(key).get_shape())
        except (OSError, SafetensorError) as error:
            raise damaged(file, error) from error
    return stored


def _name_of(key: str, names: set[str], prefix: str) -> str | None:
    """A body's names may come with the prefix that it has below a head, or without."""
    candidates = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
    return next((name for name in candidates if name in names), None)


def _files(folder: Path) -> list[Path]:
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    if not (folder / INDEX).is_file():
        return []
    try:
        places = json.loads((folder / INDEX).read_text())["weight_map"].values()
        return [folder / name for name in sorted(set(places))]
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise damaged(folder / INDEX, error) from error


def _read(file: Path, key: str) -> Tensor:
    # Opened again each time: pages of a mapped file no longer count once it is closed.
    try:
        with safe_open(file, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(key)
            return tensor
    except (OSError, SafetensorError) as error:
        raise damaged(file, error) from error


def damaged(file: Path, error: Exception) -> ConfigError:
    """The error of a file that cannot be read."""
    what = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
    return ConfigError(f"{file} {what}; copy the model directory there again")
