"""A Hugging Face model directory -> a model: what both ends start from, before any version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from headway.contracts.config.model import ModelConfig
from headway.contracts.errors import ConfigError

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


def hollow_model(config: ModelConfig) -> Any:
    """The same model with its buffers, and with parameters on the meta device: nothing is read of them.

    Raises:
        ConfigError: the directory is missing, or describes no such model.
    """
    unread = config.model_copy(update={"init_from_scratch": True})
    with torch.random.fork_rng([]), parameters_on_meta():
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
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model directory (no config.json); set model.path")
    options = {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": config.attn_implementation,
    }
    try:
        if config.init_from_scratch:
            torch.manual_seed(config.seed)
            found = AutoConfig.from_pretrained(folder, local_files_only=True, **settings)
            return kind.from_config(found, **options), set()
        options |= {"local_files_only": True, "output_loading_info": True}
        model, report = kind.from_pretrained(folder, **options, **settings)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        what = kind.__name__.removeprefix("AutoModelFor")
        raise ConfigError(f"cannot load a model for {what} from {folder}: {error}") from error
    return model, set(report["missing_keys"])


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
