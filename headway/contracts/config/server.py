"""A generation server's own settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headway.contracts.config.base import Config
from headway.contracts.config.gateway import ExecutorConfig, ServiceConfig, default_port
from headway.contracts.config.model import ModelConfig


class EmbeddedTorchConfig(Config):
    """The embedded torch backend: CPU or one GPU."""

    type: Literal["embedded_torch"] = "embedded_torch"
    max_sequences: int = Field(128, ge=1)
    """Sequences decoded together (slots of the KV cache)."""
    max_context: int | None = Field(None, ge=2)
    """Tokens per sequence, prompt included; None takes the model's limit."""
    max_prefill_tokens: int = Field(8192, ge=1)
    """Padded tokens of one prefill pass, at most (one longer prompt still runs, alone)."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads; None keeps PyTorch's choice."""
    seed: int = Field(0, ge=0)
    """Seed for requests that bring none."""


class FakeBackendConfig(Config):
    """Deterministic tokens without a model, for tests and load runs."""

    type: Literal["fake"] = "fake"
    token_latency_s: float = Field(0.0, ge=0.0)
    """Seconds per token."""
    vocab_size: int = Field(1000, ge=2)
    """Tokens are drawn from [0, vocab_size)."""
    max_context: int = Field(32768, ge=2)
    """Tokens per sequence, prompt included."""


BackendConfig = Annotated[EmbeddedTorchConfig | FakeBackendConfig, Field(discriminator="type")]


class ServerConfig(Config):
    service: Annotated[ServiceConfig, default_port(8001)] = ServiceConfig(port=8001)
    model: ModelConfig
    backend: BackendConfig = EmbeddedTorchConfig()
    gateway: str | None = Field(None, pattern=r"^https?://[^\s/]+$")
    """Gateway to register with; None serves alone."""
    advertise_url: str | None = Field(None, pattern=r"^https?://[^\s/]+$")
    """URL under which the gateway reaches this server; None takes the bound address."""
    heartbeat_s: float = Field(1.0, gt=0.0)
    """Seconds between heartbeats to the gateway."""
    weights_root: str | None = None
    """Directory below which versions may be loaded; None refuses every update."""
    initial_version: int = Field(0, ge=0)
    """Version of the weights in `model.path`."""
    executor: ExecutorConfig = ExecutorConfig()
