"""The model that a trainer starts from, with the head that it is asked for: whole, or shard by shard.

A sharded model is built without parameters (they are on the meta device), split, and filled one tensor
at a time from the first rank: no rank ever holds all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForSequenceClassification

from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.errors import ConfigError
from trainer.backends.stored_weights import find_weights, list_tensors
from trainer.topology import Topology
from weight_sync.model_dir import (
    MAKING_MODELS,
    load_model,
    model_without_weights,
    parameters_on_meta,
    read_model,
)

SCORE = "score"
"""The head of a sequence classification model; with one label, its weight is [1, H]."""

Weights = Mapping[str, Callable[[], Tensor]]
"""Name of each parameter -> function that reads it, whole, on the CPU."""


def load_trained_model(config: TrainedModelConfig) -> Any:
    """A causal language model, or its body with a scalar head: the stored one or a fresh one.

    Raises:
        ConfigError: the directory is missing, holds no such model, or not all of it; or a file of it is
            damaged.
    """
    if not config.init_from_scratch:
        list_tensors(Path(config.path))
    if config.head == "lm":
        return load_model(config)
    model, missing = read_model(config, AutoModelForSequenceClassification, num_labels=1)
    head = _score(model)
    fresh = {f"{SCORE}.weight"}
    if missing - fresh:
        raise ConfigError(
            f"{config.path} does not hold {', '.join(sorted(missing - fresh)[:3])} of the model's "
            "body; set model.path to a whole one"
        )
    if missing or config.init_from_scratch:
        with torch.no_grad():
            head.weight.copy_(_first_score(head.weight, config.seed))
    return model


def build_without_parameters(config: TrainedModelConfig) -> Any:
    """The same model with its buffers, and with parameters on the meta device.

    Raises:
        ConfigError: the directory is missing, or describes no such model.
    """
    if config.head == "lm":
        return model_without_weights(config)
    unread = config.model_copy(update={"init_from_scratch": True})
    with MAKING_MODELS, torch.random.fork_rng([]), parameters_on_meta():
        model, _ = read_model(unread, AutoModelForSequenceClassification, num_labels=1)
        _score(model)
    return model


def find_trained_weights(config: TrainedModelConfig, model: Any) -> Weights:
    """Return the weights that `load_trained_model` would load.

    Read one at a time where the files name what the model has; else transformers, which knows older
    names and formats, reads them all.

    Args:
        model: built without parameters.
    Raises:
        ConfigError: as `load_trained_model`.
    """
    score = f"{SCORE}.weight"
    found: dict[str, Callable[[], Tensor]] | None = None
    if not config.init_from_scratch:
        found = find_weights(model, Path(config.path), optional={score})
    if found is None:
        whole = dict(load_trained_model(config).named_parameters())
        return {name: parameter.detach for name, parameter in whole.items()}
    if config.head == "value" and score not in found:
        head = model.get_parameter(score)
        found[score] = lambda: _first_score(head, config.seed)
    return found


def fill(model: torch.nn.Module, find: Callable[[], Weights], topology: Topology) -> None:
    """Give parameters that are sharded on the meta device their values; collective.

    Args:
        find: called by the first rank alone.
    Raises:
        ConfigError: there are no such weights; on every rank.
    """
    weights, failure = None, None
    try:
        weights = find() if topology.is_main else None
    except ConfigError as error:
        failure = error
    if topology.max(int(failure is not None)):
        raise failure or ConfigError("the first rank could not load the model; see its log")
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = stand_in(parameter) if weights is None else weights[name]().to(parameter.dtype)
        parts = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.to_local().copy_(parts.to_local())


def stand_in(parameter: DTensor) -> Tensor:
    """Return the argument for `distribute_tensor` on a rank without values of a whole parameter:
    memory that is never touched, on the device of its shards. On another device it would be copied
    there.
    """
    device = parameter.device_mesh.device_type
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=device)


def materialize(model: torch.nn.Module, device: torch.device) -> None:
    """Allocate parameters that are on the meta device; buffers stay as and where they are."""
    buffers = dict(model.named_buffers())
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer)


def _score(model: Any) -> torch.nn.Linear:
    head = getattr(model, SCORE, None)
    if isinstance(head, torch.nn.Linear):
        return head
    raise ConfigError(
        f"{type(model).__name__} has no linear head named {SCORE}; train values on another architecture"
    )


def _first_score(weight: Tensor, seed: int) -> Tensor:
    """Small values of either sign: N(0, 1 / (H + 1)), as in arXiv:2009.01325."""
    generator = torch.Generator().manual_seed(seed)
    std = 1.0 / math.sqrt(weight.shape[1] + 1)
    values = torch.empty(weight.shape, dtype=weight.dtype)
    return torch.nn.init.normal_(values, std=std, generator=generator)
