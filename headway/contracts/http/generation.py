"""Orders to a generation server besides generation itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.contracts.config.base import Config

PauseMode = Literal["abort", "in_place", "retract"]
"""Effect of a pause on running sequences: end them with the tokens so far, freeze them with their
KV cache, or send them back to the queue without it (SGLang's words)."""


class GenerationAbortRequest(Config):
    """`POST /v1/generation/abort`: the requests end with the tokens so far."""

    rid: str | None = Field(None, min_length=1, max_length=128)
    """One request; None ends all."""


class GenerationPauseRequest(Config):
    """`POST /v1/generation/pause`: decoding stops; new requests wait until it goes on."""

    mode: PauseMode = "in_place"


class FlushResponse(Config):
    flushed: bool
    """False if sequences were running; nothing was dropped."""
