"""A call: whom it asks, what it reads of the batch, and what it adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["data", "generate", "inference", "train_step", "compute"]
"""`data` brings a batch of rows, `generate` one of rollouts, `inference` asks a model (or a verifier)
about it, `train_step` is a model's update, `compute` is arithmetic on what others said."""


@dataclass(frozen=True, slots=True)
class Call:
    """A node of the dataflow; its edges follow from its keys, which are names of columns."""

    name: str
    """Of the call, for example `ref_inf`."""
    kind: Kind
    """Also the method of the interface that is called."""
    interface: str
    """Registered name of the interface."""
    input_keys: tuple[str, ...] = ()
    """Columns that it reads."""
    output_keys: tuple[str, ...] = ()
    """Columns that it adds."""
    model: str | None = None
    """The model that it asks or trains; calls on one model run one after another."""
    note: str = ""
    """For drawings: what else it does."""
