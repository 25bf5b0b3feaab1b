"""Default type of a server's weights."""

from __future__ import annotations

import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import (
    EmbeddedTorchConfig,
    EngineProcessConfig,
    PluginBackendConfig,
    ServerConfig,
)
from weight_sync.device import choose_device


def settled_model(config: ServerConfig) -> ModelConfig:
    """Return the model with the type that `dtype=auto` means here.

    Raises:
        ConfigError: there is no device as configured.
    """
    if config.model.dtype != "auto":
        return config.model
    backend = config.backend
    if isinstance(backend, EmbeddedTorchConfig):
        has_gpu = choose_device(backend.device).type == "cuda"
    elif isinstance(backend, EngineProcessConfig):
        has_gpu = backend.args.get("--device") != "cpu" and torch.cuda.is_available()
    elif isinstance(backend, PluginBackendConfig):
        has_gpu = backend.num_gpus > 0 and torch.cuda.is_available()
    else:
        has_gpu = False
    return config.model.model_copy(update={"dtype": "bfloat16" if has_gpu else "float32"})
