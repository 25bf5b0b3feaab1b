"""Destinations of a run's metrics besides its folder."""

from __future__ import annotations

from pydantic import Field

from headway.contracts.config.base import Config


class MetricsConfig(Config):
    """Names and addresses only: the key of a service comes from the environment (`WANDB_API_KEY`)."""

    sinks: tuple[str, ...] = ()
    """Registered sinks besides `metrics.jsonl`, which is always written: `tensorboard`, `wandb`."""
    project: str = Field("headway", min_length=1)
    """Project that the run belongs to (`wandb`)."""
    run_name: str | None = Field(None, min_length=1)
    """Name of the run; None takes the last part of `run_dir`."""
    tags: tuple[str, ...] = ()
    """Labels to find the run by (`wandb`)."""
    peak_tflops: float | None = Field(None, gt=0.0)
    """Peak of one device, in 10¹² floating-point operations per second, to which `mfu` refers; None
    takes it from a table of GPUs (dense bfloat16), which knows no other GPUs and no CPUs."""
