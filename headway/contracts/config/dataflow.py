"""The calls of a version: further ones, and how they run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from headway.contracts.config.base import ComponentConfig, Config


class CallConfig(Config):
    """A call beside those of the experiment, or in the place of the one of its name."""

    name: str = Field(min_length=1, max_length=128)
    """Name of the call, for example `rew_inf`."""
    kind: Literal["generate", "inference", "train_step"] = "inference"
    """The method of the interface: `generate` brings a step's trajectories in the place of `actor_gen`,
    `inference` adds columns, `train_step` updates and returns metrics."""
    interface: ComponentConfig
    """Registered interface, with its arguments."""
    model: Literal["model", "critic", "reference", "teacher", "reward"] | None = None
    """The experiment's model that the interface is given; None gives none. Experiments on rows have
    `model` only."""
    input_keys: tuple[str, ...] = ()
    """Columns that it reads; `generate` reads none, every other kind at least one."""
    output_keys: tuple[str, ...] = ()
    """Columns that it adds; `scores` takes the place of those that come with the rollouts. `generate`
    adds those of every batch of rollouts, and declares none."""

    @model_validator(mode="after")
    def _check_keys(self) -> CallConfig:
        if self.kind != "generate" and not self.input_keys:
            raise ValueError(f"call {self.name!r} reads nothing; name its columns in input_keys")
        if self.kind == "generate" and (self.input_keys or self.output_keys):
            raise ValueError(
                f"call {self.name!r} generates: it reads no column, and adds those of every batch of "
                "rollouts; leave input_keys and output_keys out"
            )
        if self.kind == "generate" and self.name != "actor_gen":
            raise ValueError(
                f"call {self.name!r} generates, and a step has one batch of rollouts; name it actor_gen, "
                "which it replaces"
            )
        return self


class MicroBatchConfig(Config):
    """Micro-batches of one call."""

    n_mbs: int = Field(1, ge=1)
    """Minimum number of micro-batches on each rank, as far as it has sequences for them."""
    max_tokens_per_mb: int | None = Field(None, ge=1)
    """Token budget of a micro-batch; None takes `trainer.max_tokens_per_mb`."""


class AllocationConfig(Config):
    """What one call runs on, and how it splits a batch."""

    mb_spec: MicroBatchConfig = MicroBatchConfig()
    ranks: tuple[int, ...] | None = Field(None, min_length=1, max_length=4096)
    """Trainer ranks that hold the call's model and run it, data-parallel; the others receive its result.
    Calls on one model name the same ranks, and those on the policy rank 0 first. Calls without a common
    rank overlap, updates too. None takes all ranks."""

    @field_validator("ranks")
    @classmethod
    def _check_ranks(cls, ranks: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if ranks is not None and (min(ranks) < 0 or list(ranks) != sorted(set(ranks))):
            raise ValueError(f"ranks={list(ranks)}: name each once, in ascending order from 0 on")
        return ranks


class RowsDataflowConfig(Config):
    """Calls of experiments on rows, one after another."""

    calls: tuple[CallConfig, ...] = Field((), max_length=64)
    """Further calls."""
    trace_steps: int = Field(20, ge=0)
    """First steps of a process whose calls are written to `trace.json` in the run folder (Chrome trace
    format); 0 writes none."""


class DataflowConfig(RowsDataflowConfig):
    allocations: dict[str, AllocationConfig] = Field({}, max_length=64)
    """Ranks and micro-batches of calls by their names, for example `critic_train`; others run on all
    ranks, within `trainer.max_tokens_per_mb`."""
    max_parallel: int = Field(4, ge=1, le=64)
    """Calls that run side by side where none needs the other; 1 holds the least memory. Several ranks on
    GPUs run one at a time. Updates follow one another in any case. With `ranks` in `allocations` it is
    not looked at: calls run side by side."""
