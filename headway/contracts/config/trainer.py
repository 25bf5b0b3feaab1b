"""Trainer: how it runs its passes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.contracts.config.base import Config, JsonObject
from headway.contracts.config.model import Device
from headway.contracts.config.scheduling import SchedulingConfig

TokenNormalizeScope = Literal["global", "dp"]
"""Ranks over which a loss is averaged: `global` takes the mean over the weight (usually tokens) of all
data-parallel ranks; `dp` that of each rank, and then the mean of the ranks."""


class TrainerConfig(Config):
    modules: tuple[str, ...] = Field((), max_length=64)
    """Python modules to import at the start, whose `register_interface` and `register_backend` add
    parts."""
    backend: str = "fsdp2"
    """Registered train backend."""
    backend_args: JsonObject = {}
    """Settings that this backend alone has, checked against its own `Args`; `fsdp2` has none."""
    device: Device = "auto"
    """`cuda` is refused where PyTorch can use no GPU; `auto` is refused where there is one that it cannot
    use, and takes the CPU where there is none."""
    max_tokens_per_mb: int = Field(16384, ge=1)
    """Token budget of one packed micro-batch, per rank."""
    kept_logits_bytes: int = Field(1 << 28, ge=0)
    """Logits that a micro-batch may keep until its backward pass, per rank; the rest is computed a second
    time. It makes the head faster by up to a quarter, where that is much of a pass."""
    token_normalize_scope: TokenNormalizeScope = "global"
    """Tokens that a loss is a mean over. `global`: those of all ranks, so that each counts the same, and
    the number of ranks changes nothing. `dp`: those of each data-parallel rank, and then the mean over
    the ranks; tokens of a rank that has few of them count more."""
    shard_size: int | None = Field(None, ge=1)
    """Neighbouring ranks that hold one copy of the parameters together; it divides the number of ranks,
    and each further row of ranks holds a copy more (HybridShard). None shards over all ranks."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of parameters and activations within a pass; optimizer and sums of gradients keep
    `model.dtype` and float32. In float16 losses are scaled (`optimizer.initial_loss_scale`). `auto`
    computes a float32 model in bfloat16 on a GPU that has it, and elsewhere in `model.dtype`."""
    compile: bool = False
    """Compile the model's blocks with `torch.compile`: fewer and larger kernels, after minutes for the
    first passes. It needs a C++ compiler."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer in the CPU's memory between passes; GPUs only."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads per rank; None keeps PyTorch's choice."""
    total_steps: int = Field(100, ge=1)
    """Versions to train."""
    total_epochs: int | None = Field(None, ge=1)
    """Passes over the data to train, in place of `total_steps`; a pass is as many whole batches as there
    are. None takes `total_steps`."""
    stop_after_steps: int | None = Field(None, ge=1)
    """End the run after this many steps, although its schedules are of all of them; None goes to the
    end."""
    seed: int = Field(0, ge=0)
    """Seed of everything the trainer draws."""
    scheduling: SchedulingConfig = SchedulingConfig()

    @property
    def last_step(self) -> int:
        """Steps after which the run ends; of all if `total_epochs` is not looked at yet."""
        return min(self.total_steps, self.stop_after_steps or self.total_steps)

    @property
    def planned_steps(self) -> int | None:
        """Steps of the run; None before the data are counted, with `total_epochs`."""
        return self.last_step if self.total_epochs is None else self.stop_after_steps
