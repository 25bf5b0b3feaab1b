"""How the trainer runs its passes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.contracts.config.base import Config
from headway.contracts.config.scheduling import SchedulingConfig


class TrainerConfig(Config):
    modules: tuple[str, ...] = Field((), max_length=64)
    """Python modules to import at the start, whose `register_interface` and `register_backend` add
    parts."""
    backend: str = "fsdp2"
    """Registered train backend."""
    max_tokens_per_mb: int = Field(16384, ge=1)
    """Token budget of one packed micro-batch, per rank."""
    kept_logits_bytes: int = Field(1 << 28, ge=0)
    """Logits that a micro-batch may keep until its backward pass, per rank; the rest is computed a second
    time. It makes the head faster by up to a quarter, where that is much of a pass."""
    shard_size: int | None = Field(None, ge=1)
    """Neighbouring ranks that hold one copy of the parameters together; it divides the number of ranks,
    and each further row of ranks holds a copy more (HybridShard). None shards over all ranks."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of parameters and activations within a pass; optimizer and sums of gradients keep
    `model.dtype` and float32. None computes in `model.dtype`."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer in the CPU's memory between passes; GPUs only."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads per rank; None keeps PyTorch's choice."""
    total_steps: int = Field(100, ge=1)
    """Versions to train."""
    seed: int = Field(0, ge=0)
    """Seed of everything the trainer draws."""
    scheduling: SchedulingConfig = SchedulingConfig()
