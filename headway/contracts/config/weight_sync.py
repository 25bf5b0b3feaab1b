"""How versions travel from the trainer to the servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.contracts.config.base import Config


class DiskSync(Config):
    """Versions as directories on a local or shared filesystem."""

    type: Literal["disk"] = "disk"
    root: str = Field(min_length=1)
    """Directory that holds one subdirectory per version."""
    keep: int = Field(3, ge=1)
    """Newest versions to keep; older ones are deleted."""
    shard_bytes: int = Field(1 << 30, ge=1 << 20)
    """Largest size of one file."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Cast on publication; None keeps the trainer's type."""


WeightSyncConfig = DiskSync
"""Becomes a union discriminated by `type` with the second transport."""
