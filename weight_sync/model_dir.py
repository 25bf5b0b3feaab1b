"""A Hugging Face model directory -> a model, from which both ends start, before any version."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from headway.contracts.config.model import ModelConfig
from headway.contracts.errors import ConfigError
from headway.runtime.model_files import check_regular, check_text, read_object
from weight_sync.checkpoint import checkpoint_shapes

MAX_ELEMENTS = 1 << 43
"""Most elements of a model that has no weights yet."""
MAX_PARAMETERS = 1 << 18
MAX_LAYERS = 4096
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
MAX_PACKED = 16
"""Elements of a model in one of its weights' files, at most: some formats pack them."""
SLACK_ELEMENTS = 1 << 24
"""Most elements of a model that its files do not contain: heads that are new, for example."""
MAKING_MODELS = threading.RLock()
"""Held by a thread while it makes a model. Meanwhile, transformers replaces functions of its classes, for
example the one that ties embeddings. If two threads do so at once, one puts back what the other had put
there: from then on, the process makes no whole models."""
_LOCAL = {"local_files_only": True, "trust_remote_code": False}

transformers_logging.disable_progress_bar()  # logs are lines; a bar rewrites them


def load_model(config: ModelConfig) -> Any:
    """The causal language model of a directory, or one of its kind with random weights.

    Raises:
        ConfigError: the directory is missing or holds no causal language model.
    """
    model, missing = read_model(config, AutoModelForCausalLM)
    if missing:
        raise ConfigError(
            f"{config.path} does not hold {', '.join(sorted(missing)[:3])} of its causal language "
            "model; set model.path to a whole one, or model.init_from_scratch for random weights"
        )
    return model


def model_without_weights(config: ModelConfig) -> Any:
    """The same model with its buffers, and with parameters on the meta device: nothing is read of them.

    Raises:
        ConfigError: the directory is missing, or describes no such model.
    """
    unread = config.model_copy(update={"init_from_scratch": True})
    with MAKING_MODELS, torch.random.fork_rng([]), parameters_on_meta():
        model, _ = read_model(unread, AutoModelForCausalLM)
    if (Path(config.path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(
            config.path, local_files_only=True
        )
    return model


def read_model(config: ModelConfig, kind: Any, **settings: Any) -> tuple[Any, set[str]]:
    """A model of a directory, and the parameters that are random because it does not hold them.

    Args:
        kind: an auto class of transformers.
        settings: replace those of config.json.
    Raises:
        ConfigError: the directory is missing or holds no such model.
    """
    folder = Path(config.path)
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} is not a model directory (no config.json); set model.path")
    _check_files(folder)
    options = {
        "dtype": torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype),
        "attn_implementation": config.attn_implementation,
    }
    try:
        if config.init_from_scratch:
            found = AutoConfig.from_pretrained(folder, **_LOCAL, **settings)
            with MAKING_MODELS, _limited(MAX_ELEMENTS):
                torch.manual_seed(config.seed)
                return kind.from_config(found, **options, trust_remote_code=False), set()
        with MAKING_MODELS, _limited(_most_elements(config.path)):
            model, report = kind.from_pretrained(
                folder, **options, **_LOCAL, **settings, output_loading_info=True
            )
    except ConfigError:
        raise
    except Exception as error:  # what a configuration can make a library raise has no end
        what = kind.__name__.removeprefix("AutoModelFor")
        raise ConfigError(f"cannot load a model for {what} from {folder}: {error}") from error
    return model, set(report["missing_keys"])


def _check_files(folder: Path) -> None:
    config = read_object(folder / "config.json")
    for part in (config, *config.values()):
        for name in LAYERS if isinstance(part, dict) else ():
            if isinstance(count := part.get(name), int) and count > MAX_LAYERS:
                raise ConfigError(
                    f"{folder}/config.json describes a model of {count} layers ({name})"
                )
    for file in folder.glob("*.json"):
        check_text(file)
    for file in folder.glob("*.safetensors"):
        check_regular(file)


def _most_elements(model: str) -> int:
    """Return the most elements that the parameters of a model may have, given those in its directory."""
    held = sum(shape.numel() for shape in checkpoint_shapes(model).values())
    return MAX_PACKED * held + SLACK_ELEMENTS if held else MAX_ELEMENTS


@contextmanager
def _limited(max_elements: int) -> Iterator[None]:
    """Limit the parameters of the modules made here to `max_elements`, whatever a configuration says."""
    left, seen = max_elements, set[tuple[int, str]]()

    def count(
        module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
    ) -> torch.nn.Parameter | None:
        nonlocal left
        place = (id(module), name)
        if (
            parameter is not None and place not in seen
        ):  # each is registered once more when it is read
            seen.add(place)
            left -= parameter.numel()
        if left < 0 or len(seen) > MAX_PARAMETERS:
            raise ConfigError(
                f"the model's config.json describes more than {max_elements} elements or "
                f"{MAX_PARAMETERS} parameters, which its weights do not hold"
            )
        return None

    handle = register_module_parameter_registration_hook(count)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made here get parameters without memory, before anything initialises them."""

    def move(
        module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
    ) -> torch.nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # as it is: a tied one has to stay the same
        return torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    # Documented to take what the hook returns; its type says otherwise.
    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
