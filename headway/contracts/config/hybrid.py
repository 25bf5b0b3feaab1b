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
    """Copies that generation keeps while the model trains: none; what training does not change
    (with adapters, everything but them), which is then gathered once; or all of them, to be written
    to again."""
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
        if backend.device != "auto":
            raise ValueError(
                f"device={backend.device}: generation runs where the trainer does; leave it out, and set "
                "trainer.device"
            )
        return backend
