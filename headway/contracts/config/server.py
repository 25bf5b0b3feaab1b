"""A generation server's own settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints, field_validator, model_validator

from headway.contracts.config.base import Config, PluginConfig
from headway.contracts.config.gateway import (
    EnvironmentName,
    ExecutorConfig,
    ServiceConfig,
    default_port,
)
from headway.contracts.config.model import Device, ModelConfig
from headway.contracts.config.weight_sync import ReceiverConfig

UpdatePolicy = Literal["keep", "recompute", "abort", "drain"]
"""Effect of a swap on running sequences: `keep` goes on with the KV cache, `recompute` rebuilds it
under the new weights, `abort` answers with the tokens so far, `drain` lets them end first."""


class EmbeddedTorchConfig(Config):
    """The embedded torch backend: CPU or one GPU."""

    type: Literal["embedded_torch"] = "embedded_torch"
    device: Device = "auto"
    """`cuda` is refused where PyTorch can use no GPU; `auto` is refused where there is one that it cannot
    use, and takes the CPU where there is none."""
    max_sequences: int = Field(128, ge=1)
    """Maximum number of sequences decoded together."""
    max_context: int | None = Field(None, ge=2)
    """Tokens per sequence, prompt included; None takes the model's limit."""
    max_prefill_tokens: int = Field(2048, ge=1)
    """Maximum number of prompt tokens computed in one step: a longer prompt is split into chunks, between
    which running sequences go on."""
    kv_cache_bytes: int | None = Field(None, ge=1 << 16)
    """Memory for keys and values; None takes 40 % of what is free. On a GPU None takes 80 % of what is
    free beside a second copy of the weights, which a swap needs; 40 % where the type of the weights has
    no FlashAttention."""
    speculative_tokens: int = Field(0, ge=0, le=64)
    """Maximum number of tokens of a sequence that are guessed from its own n-grams and checked in one
    step; the output stays the same. 0 guesses none."""
    max_adapters: int = Field(8, ge=0)
    """Maximum number of adapters that are served beside the base."""
    cuda_graphs: bool = True
    """On a GPU, record the launches of a decode step once per batch size, and replay them as one."""
    pack_weights: bool = True
    """On the CPU, hold the weights of linear layers a second time, in the layout of its kernels."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads; None keeps PyTorch's choice."""
    seed: int = Field(0, ge=0)
    """Seed for requests that bring none."""


class EngineProcessConfig(Config):
    """A generation engine of its own, as a child of this server or at a URL."""

    url: str | None = Field(None, pattern=r"^https?://[^\s/]+$")
    """Attach to the engine that answers here; None starts one."""
    python: str | None = None
    """Python interpreter that has the engine installed; None takes this one."""
    args: dict[str, JsonValue] = {}
    """The engine's own flags, not renamed: `{"--tp-size": 2, "--trust-remote-code": true}`; a flag
    without a value is `true`."""
    env: dict[str, str] = {}
    """Environment variables of the child, besides those of this server."""
    log_file: str | None = None
    """File for the child's output; None adds it to this server's standard error."""
    start_timeout_s: float = Field(600.0, gt=0.0)
    """Seconds until the engine must answer."""
    health_interval_s: float = Field(5.0, gt=0.0)
    """Seconds between health checks."""
    health_timeout_s: float = Field(60.0, gt=0.0)
    """An engine without progress and without an answer for this long is taken for hung, and ended."""

    @model_validator(mode="after")
    def _check(self) -> EngineProcessConfig:
        given = [name for name in ("python", "args", "env", "log_file") if getattr(self, name)]
        if self.url is not None and given:
            raise ValueError(
                f"{', '.join(given)} are for an engine that this server starts; with url={self.url} "
                "leave them out"
            )
        return self


AdapterRank = Literal[8, 16, 32, 64, 128, 256, 320, 512]
"""Those that vLLM takes."""


class SGLangConfig(EngineProcessConfig):
    """An SGLang server behind our contract."""

    type: Literal["sglang"] = "sglang"
    receive: Literal["files", "group"] = "files"
    """Path of versions to the engine. `files`: this server receives and verifies them while the
    engine generates, and the engine loads them at the commit. `group`: the engine's own processes
    join the trainer's process group (one data-parallel and one pipeline rank), and the bytes flow
    from GPU to GPU into the live weights; nothing is generated from the first bucket until the
    commit, and the server holds nothing that others could fetch. Versions that do not flow come as
    files either way."""
    max_adapters: int = Field(0, ge=0)
    """Maximum number of LoRA adapters that are served beside the base. An engine at a `url` needs
    `--enable-lora`, `--max-lora-rank`, `--lora-target-modules`, and `--max-loras-per-batch` of at least
    this and 2."""
    max_adapter_rank: AdapterRank = 64
    """Highest rank of an adapter."""


class VLLMConfig(EngineProcessConfig):
    """A vLLM server behind our contract."""

    type: Literal["vllm"] = "vllm"
    max_adapters: int = Field(0, ge=0)
    """Maximum number of LoRA adapters that are served beside the base; the engine has two places more. An
    engine at a `url` needs `--enable-lora`, `--max-loras` of at least this and 2, and
    `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` in its environment."""
    max_adapter_rank: AdapterRank = 64
    """Highest rank of an adapter."""


class FakeBackendConfig(Config):
    """Deterministic tokens without a model, for tests and load runs."""

    type: Literal["fake"] = "fake"
    token_latency_s: float = Field(0.0, ge=0.0)
    """Seconds per token."""
    vocab_size: int | None = Field(None, ge=2)
    """Tokens are drawn from [0, vocab_size); None takes the model's, or 1000 where there is none."""
    max_context: int = Field(32768, ge=2)
    """Tokens per sequence, prompt included."""


class PluginBackendConfig(PluginConfig):
    """A backend of another package: of an installed one by its entry point
    (`headway.generation_backends`), or of one of `modules`."""

    num_gpus: int = Field(1, ge=0)
    """GPUs that one server asks for where there are some."""


BackendConfig = Annotated[
    EmbeddedTorchConfig | SGLangConfig | VLLMConfig | FakeBackendConfig | PluginBackendConfig,
    Field(discriminator="type"),
]


GatewayURL = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+$")]


class ServerConfig(Config):
    service: Annotated[ServiceConfig, default_port(8001)] = ServiceConfig(port=8001)
    model: ModelConfig
    backend: BackendConfig = EmbeddedTorchConfig()
    modules: tuple[str, ...] = Field((), max_length=64)
    """Python modules to import at the start, whose `register_backend` adds generation backends; and, of a
    server that runs rollouts without a gateway, what the gateway's `modules` add."""
    gateway: GatewayURL | tuple[GatewayURL, ...] | None = None
    """Gateway to register with; None serves alone. Of several, which share a ledger, one is reported to,
    and the next when that does not answer."""
    gateway_token_env: EnvironmentName | None = None
    """Environment variable with a bearer token of the gateway that has the role `server`."""
    advertise_url: str | None = Field(None, pattern=r"^https?://[^\s/]+$")
    """URL under which the gateway reaches this server; None takes the bound address."""
    heartbeat_s: float = Field(1.0, gt=0.0)
    """Seconds between heartbeats to the gateway."""
    weights: ReceiverConfig = ReceiverConfig()
    initial_version: int = Field(0, ge=0)
    """Version of the weights in `model.path`."""
    update_policy: UpdatePolicy = "keep"
    """Effect of a new version on the sequences that are running."""
    group_timeout_s: float = Field(300.0, gt=0.0)
    """Seconds to wait for the other members of a weight update group: to meet, and for each bucket."""
    max_in_flight: int = Field(4096, ge=1)
    """Maximum number of requests running or waiting; more get 429."""
    request_timeout_s: float | None = Field(None, gt=0.0)
    """Seconds after which a request is ended and answered with 504; None has no limit."""
    served_model_name: str | None = None
    """Name that OpenAI clients see; None takes the last part of `model.path`."""
    executor: ExecutorConfig = ExecutorConfig()

    @property
    def gateways(self) -> tuple[str, ...]:
        """Those to register with."""
        if self.gateway is None:
            return ()
        return (self.gateway,) if isinstance(self.gateway, str) else self.gateway

    @model_validator(mode="after")
    def _can_drain(self) -> ServerConfig:
        is_live = isinstance(self.backend, SGLangConfig) and self.backend.receive == "group"
        if is_live and self.update_policy == "drain":
            raise ValueError(
                "update_policy=drain lets requests end under the old weights, which backend.receive="
                "group overwrites before; choose another policy, or receive files"
            )
        return self

    @field_validator("backend", mode="before")
    @classmethod
    def _embedded_unless_named(cls, given: object) -> object:
        return {"type": "embedded_torch", **given} if isinstance(given, dict) else given
