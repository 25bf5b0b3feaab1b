"""A call: whom it asks, what it reads of the batch, and what it adds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.dataflow import CallConfig

Kind = Literal["data", "generate", "inference", "train_step", "compute"]
"""`data` brings a batch of rows, `generate` one of rollouts, `inference` asks a model (or a verifier)
about it, `train_step` is a model's update, `compute` is arithmetic on the others' columns."""


@dataclass(frozen=True, slots=True)
class Call:
    """A node of the dataflow; its edges follow from its keys, which are names of columns."""

    name: str
    """Name of the call, for example `ref_inf`."""
    kind: Kind
    """Kind of the call; also the method of the interface that runs it."""
    interface: str
    """Registered name of the interface."""
    input_keys: tuple[str, ...] = ()
    """Columns that it reads."""
    output_keys: tuple[str, ...] = ()
    """Columns that it adds."""
    model: str | None = None
    """The model that it asks or trains; calls on one model run one after another."""
    note: str = ""
    """Note for drawings: what else the call does."""

    def trains(self, model: str) -> bool:
        """True if the call updates the model of this name."""
        return self.kind == "train_step" and self.model == model


def further_calls(configs: Iterable[CallConfig]) -> tuple[Call, ...]:
    """Return the calls of a configuration; not that which generates, whose columns the experiment
    knows."""
    return tuple(
        Call(c.name, c.kind, c.interface.name, c.input_keys, c.output_keys, c.model)
        for c in configs
        if c.kind != "generate"
    )


def interface_of(call: Call, configs: Sequence[CallConfig]) -> ComponentConfig:
    """Return a call's interface with the arguments that the configuration gives it."""
    named = (config.interface for config in configs if config.name == call.name)
    return next(named, ComponentConfig(name=call.interface))
