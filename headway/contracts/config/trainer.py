"""How the trainer runs its passes."""

from __future__ import annotations

from pydantic import Field

from headway.contracts.config.base import Config


class TrainerConfig(Config):
    backend: str = "fsdp2"
    """Registered train backend."""
    max_tokens_per_mb: int = Field(16384, ge=1)
    """Token budget of one packed micro-batch, per rank."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads per rank; None keeps PyTorch's choice."""
    total_steps: int = Field(100, ge=1)
    """Versions to train."""
    seed: int = Field(0, ge=0)
    """Seed of everything the trainer draws."""
