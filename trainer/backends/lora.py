"""Low-rank adapters (LoRA, arXiv:2106.09685) in a model, by `peft`: W' = W + scale · B · A.

What is published and exported is named and merged as `weight_sync.adapter` has it, so that a server
which merges an adapter holds the bits of the merged model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headway.contracts.config.model import LoraConfig
from headway.contracts.errors import ConfigError
from weight_sync.adapter import (
    CONFIG_NAME,
    LORA_A,
    LORA_B,
    PREFIX,
    adapter_config,
    make_adapter,
    merge_weight,
    scale_of,
)
from weight_sync.manifest import Adapter

_BASE = ".base_layer."
_LORA = ".lora_"
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"
ADAPTER_NAME = "default"
"""Default name of an adapter in `peft`."""
ADAPTER_FOLDER = "adapter"
"""Below an exported model."""
WEIGHTS_NAME = "adapter_model.safetensors"

Whole = Callable[[Tensor], Tensor]
"""A parameter -> all of it, gathered; collective if it is sharded."""


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapters in a model."""

    model: Any
    adapter: Adapter
    modules: tuple[str, ...]
    """Names of the adapted modules."""
    dropout: float

    def tensors(self, whole: Whole) -> Iterator[tuple[str, Tensor]]:
        """A and B of every module, as `peft` saves them."""
        parameters = dict(self.model.named_parameters())
        for module in self.modules:
            yield PREFIX + module + LORA_A, whole(parameters[module + _A])
            yield PREFIX + module + LORA_B, whole(parameters[module + _B])

    def first(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Values to begin with, by parameter: A ~ U(-1 / sqrt(in), 1 / sqrt(in)) as `peft` has it, B = 0,
        so that nothing changes yet."""
        generator = torch.Generator().manual_seed(seed)
        parameters = dict(self.model.named_parameters())
        for module in self.modules:
            a, b = parameters[module + _A], parameters[module + _B]
            values = torch.empty(a.shape, dtype=a.dtype)
            bound = 1.0 / math.sqrt(a.shape[1])
            yield module + _A, values.uniform_(-bound, bound, generator=generator)
            yield module + _B, torch.zeros(b.shape, dtype=b.dtype)

    def base(self, whole: Whole) -> Iterator[tuple[str, Tensor]]:
        """The model without the adapters."""
        for name, parameter in self.model.named_parameters():
            if _LORA not in name:
                yield base_name(name), whole(parameter)

    def merged(self, whole: Whole) -> Iterator[tuple[str, Tensor]]:
        """The model with the adapters in it, under the names that it had without."""
        parameters = dict(self.model.named_parameters())
        scale = scale_of(self.adapter)
        for name, tensor in self.base(whole):
            module = name.removesuffix(".weight")
            if module + _A in parameters:
                a, b = whole(parameters[module + _A]), whole(parameters[module + _B])
                yield name, merge_weight(tensor, a, b, scale)
            else:
                yield name, tensor

    def write(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """A directory that `peft` loads.

        Args:
            tensors: as `tensors` gives them, on the CPU.
        """
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        (folder / CONFIG_NAME).write_text(adapter_config(self.adapter, self.modules))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Turn the adapters off during the block; exact to the bit.

        By their scale: `peft` disables adapters by freezing them, and FSDP would keep that of its first
        pass.
        """
        layers: list[Any] = [self.model.get_submodule(name) for name in self.modules]
        for layer in layers:
            layer.set_scale(ADAPTER_NAME, 0.0)
        try:
            yield
        finally:
            for layer in layers:
                layer.set_scale(ADAPTER_NAME, 1.0)

    @contextmanager
    def with_dropout(self, seed: int) -> Iterator[None]:
        """Turn the adapters' dropout on during the block, drawn from a seed; elsewhere they drop nothing.

        Logprobs that are compared with one another come from passes without.
        """
        layers = [self.model.get_submodule(name).lora_dropout for name in self.modules]
        device = next(self.model.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            for layer in layers:
                layer.train()
            try:
                yield
            finally:
                for layer in layers:
                    layer.eval()


def base_name(name: str) -> str:
    """Return the name that a parameter had before adapters were added."""
    return name.replace(_BASE, ".")


def plain_name(name: str) -> str:
    """Return the name of any parameter, also of an adapter's, without the words that `peft` adds."""
    return base_name(name).replace(_A, LORA_A).replace(_B, LORA_B)


def add_lora(model: Any, config: LoraConfig, seed: int, trained: tuple[str, ...] = ()) -> Lora:
    """Put adapters that change nothing yet (B = 0) into a model, and train only them.

    Args:
        seed: of A; ranks must agree on it.
        trained: further parameters that are trained, by name.
    Raises:
        ConfigError: `peft` is missing, or the modules are not there or no linear layers below the head.
    """
    try:
        import peft  # an extra
    except ImportError as error:
        raise ConfigError("model.lora needs peft; install Headway with the extra 'lora'") from error
    options = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules),
        task_type="CAUSAL_LM",
    )
    modules = _targets(model, config.target_modules, {name.rpartition(".")[0] for name in trained})
    with torch.random.fork_rng([]):
        peft.inject_adapter_in_model(options, model)
    for name in trained:
        model.get_parameter(name).requires_grad_(True)
    model.eval()
    lora = Lora(model, make_adapter(options.to_dict()), modules, config.dropout)
    for name, values in lora.first(seed):
        parameter = model.get_parameter(name)
        if not parameter.is_meta:
            parameter.data.copy_(values)
    return lora


def _targets(model: Any, ends: tuple[str, ...], heads: set[str]) -> tuple[str, ...]:
    """The modules whose names end so, as `peft` chooses them."""
    head = model.get_output_embeddings()
    parts = {
        name: part
        for name, part in model.named_modules()
        if any(f".{name}".endswith(f".{end}") for end in ends)
    }
    if not parts:
        raise ConfigError(
            f"model.lora.target_modules={list(ends)} are not in this model; name others"
        )
    for name, part in parts.items():
        if not isinstance(part, torch.nn.Linear) or part is head or name in heads:
            raise ConfigError(
                f"model.lora.target_modules matches {name}, a {type(part).__name__}; only linear layers "
                "below the head can have an adapter"
            )
    return tuple(parts)
