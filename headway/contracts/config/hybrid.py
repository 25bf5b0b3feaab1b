"""Generation in the trainer's own process, with the trainer's parameters."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from headway.contracts.config.base import Config
from headway.contracts.config.server import EmbeddedTorchConfig


class HybridConfig(Config):
    backend: EmbeddedTorchConfig = EmbeddedTorchConfig(pack_weights=False)
    """The generation backend of each rank. Weights are not packed: that would be a copy of those that
    training holds."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights that generate; None takes `model.dtype`. Another one than training holds is a
    copy."""
    keep: Literal["nothing", "frozen", "all"] = "frozen"
    """What generation goes on holding of its own copies while the model trains: nothing; what training
    does not change (with adapters, all but them), which then is gathered once; or all of it, to be
    written to again."""
    rename: dict[str, str] = {}
    """Parameter of the trainer -> name that the generation backend knows; a prefix that ends in `*` is
    replaced by the value's prefix. Names that nothing matches stay."""
    skip: tuple[str, ...] = ()
    """Parameters of the trainer that the generation backend does not have."""

    @field_validator("backend", mode="before")
    @classmethod
    def _unpacked_unless_told(cls, given: object) -> object:
        return {"pack_weights": False, **given} if isinstance(given, dict) else given

    @field_validator("backend")
    @classmethod
    def _shares_weights(cls, backend: EmbeddedTorchConfig) -> EmbeddedTorchConfig:
        if backend.pack_weights:
            raise ValueError(
                "pack_weights=True would hold the weights a second time; set it to false to generate in "
                "the trainer's process"
            )
        return backend
