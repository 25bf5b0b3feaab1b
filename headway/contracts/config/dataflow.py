"""The calls of a version: further ones, and how they run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.contracts.config.base import Config, PartConfig


class CallConfig(Config):
    """A call beside those of the experiment, or in the place of the one of its name."""

    name: str = Field(min_length=1, max_length=128)
    """Of the call, for example `rew_inf`."""
    kind: Literal["inference", "train_step"] = "inference"
    """The method of the interface: `inference` adds columns, `train_step` updates and tells figures."""
    interface: PartConfig
    """Registered interface, with its arguments."""
    model: Literal["model", "critic", "reference", "teacher"] | None = None
    """The experiment's model that the interface is given; None gives none."""
    input_keys: tuple[str, ...] = Field(min_length=1)
    """Columns that it reads."""
    output_keys: tuple[str, ...] = ()
    """Columns that it adds; `scores` takes the place of those that come with the rollouts."""


class FixedDataflowConfig(Config):
    """Calls as the experiment has them, one after another."""

    trace_steps: int = Field(20, ge=0)
    """First steps of a process whose calls are written to `trace.json` in the run folder (Chrome trace
    format); 0 writes none."""


class DataflowConfig(FixedDataflowConfig):
    calls: tuple[CallConfig, ...] = Field((), max_length=64)
    """Further calls."""
    max_parallel: int = Field(4, ge=1, le=64)
    """Calls that run side by side where none needs the other; 1 holds the least memory. Several ranks on
    GPUs run one at a time. Updates follow one another in any case."""
