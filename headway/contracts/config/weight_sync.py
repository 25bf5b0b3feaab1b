"""Transports: how versions travel from the trainer to the servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from headway.contracts.config.base import Config, PluginConfig
from headway.contracts.config.gateway import EnvironmentName

Dtype = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["int8", "float8_e4m3fn"]
MAX_CHAIN = 128
"""Versions that a server reads one after the other to make one."""


class DeltaConfig(Config):
    """Publish only what changed since the version before."""

    full_every: int = Field(default=16, ge=1, le=MAX_CHAIN)
    """Every n-th version is published whole, so that a chain stays short."""
    level: int = Field(default=1, ge=1, le=19)
    """Effort of zstd: 1 is fastest."""


class PublishConfig(Config):
    """Changes that every transport makes to the weights on their way out."""

    dtype: Dtype | None = None
    """Cast on publication; None keeps the trainer's type."""
    quantization: Quantization | None = None
    """Send matrices in 8 bits with one scale per row; servers get them back in `dtype`, rounded.
    None sends every bit."""
    rename: dict[str, str] = {}
    """Parameter of the trainer -> name that the servers know; a prefix that ends in `*` is replaced
    by the value's prefix. Names that nothing matches stay."""
    skip: tuple[str, ...] = ()
    """Parameters that are not published, for example the second name of a tied weight."""
    shard_bytes: int = Field(default=64 << 20, ge=1 << 20)
    """Size of one file or one bucket: gathered, checked and sent as a whole."""


class StoredSync(PublishConfig):
    """A transport that stores versions."""

    keep: int = Field(default=3, ge=1)
    """Newest versions to keep; older ones are deleted, but never what a kept one is based on."""
    delta: DeltaConfig | None = None
    """Publish differences; None publishes every version whole."""

    @model_validator(mode="after")
    def _check(self) -> StoredSync:
        if self.delta is not None and self.quantization is not None:
            raise ValueError("delta sends every bit that changed, quantization rounds; choose one")
        return self


class DiskSync(StoredSync):
    """Versions as directories on a local or shared filesystem, or in an object store."""

    type: Literal["disk"] = "disk"
    root: str = Field(min_length=1)
    """Directory, or fsspec URL (`s3://bucket/run`), that holds one subdirectory per version."""

    @property
    def origin(self) -> str:
        """Entry that a server's `weights.allow` must hold."""
        return self.root if "://" in self.root else str(Path(self.root).resolve())


class SharedMemorySync(StoredSync):
    """Versions in memory that the trainer shares with servers on the same host."""

    type: Literal["shared_memory"] = "shared_memory"
    root: str = Field(min_length=1)
    """Directory on a tmpfs, for example below /dev/shm."""

    @property
    def origin(self) -> str:
        """Entry that a server's `weights.allow` must hold."""
        return f"shm://{Path(self.root).resolve()}"


class HttpSync(StoredSync):
    """Versions that servers fetch from the trainer over HTTP."""

    type: Literal["http"] = "http"
    root: str = Field(min_length=1)
    """Directory on the trainer's own disk or tmpfs, from which the versions are served."""
    host: str = "127.0.0.1"
    """Address to bind; nothing is encrypted, so bind to a private network only."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    advertise_url: str | None = Field(default=None, pattern=r"^https?://[^\s/]+$")
    """URL under which servers reach the trainer; None takes the bound address."""
    token_env: EnvironmentName | None = None
    """Environment variable with the bearer token that servers must bring."""

    @property
    def origin(self) -> str:
        """Entry that a server's `weights.allow` must hold; any port of the host unless one is
        fixed."""
        if self.advertise_url is not None:
            return self.advertise_url
        return f"http://{_bracketed(self.host)}:{self.port or ''}"


class CollectiveSync(PublishConfig):
    """Weights broadcast to the servers in a process group."""

    type: Literal["collective"] = "collective"
    backend: Literal["gloo", "nccl", "ipc"] = "gloo"
    """Gloo on CPU, NCCL on GPU. `ipc` is for servers on the trainer's host: they open its memory by
    handle, CUDA IPC on a GPU that they must see, too, shared memory on the CPU."""
    host: str = "127.0.0.1"
    """Address under which servers reach the trainer's rendezvous."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the rendezvous; 0 takes a free one."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Seconds to wait for the members of a group to meet, and for each bucket."""

    @property
    def origin(self) -> str:
        """Entry that a server's `weights.allow` must hold; any port of the host unless one is
        fixed."""
        return f"{self.backend}://{_bracketed(self.host)}:{self.port or ''}"


class CheckpointSync(PublishConfig):
    """Versions as Hugging Face directories, whole or as differences, in the layout that slime, miles and
    SGLang's `/pull_weights` read; servers of ours read them, too."""

    type: Literal["checkpoint"] = "checkpoint"
    root: str = Field(min_length=1)
    """Directory, or fsspec URL (`s3://bucket/run`), that holds one subdirectory per version
    (`weight_v000001`), and `latest`, which names the newest."""
    keep: int = Field(default=3, ge=1)
    """Newest versions to keep; older ones are deleted, but never what a kept one is based on."""
    delta: DeltaConfig | None = DeltaConfig()
    """Publish differences; None publishes every version whole."""
    encoding: Literal["xor", "overwrite"] = "xor"
    """Bytes of a difference: all of them, combined, or those that changed with their positions, which
    may be applied twice."""
    checksum: Literal["xxh3-128", "blake3", "adler32"] = "xxh3-128"
    """Checksum of a tensor's new bytes."""
    files_from: str | None = Field(default=None, min_length=1)
    """Directory of the model whose configuration and tokenizer are copied into whole versions, for
    engines that load them from there."""

    @model_validator(mode="after")
    def _check(self) -> CheckpointSync:
        if self.quantization is not None:
            raise ValueError("other engines know no quantization of ours; leave it out")
        return self

    @property
    def origin(self) -> str:
        """Entry that a server's `weights.allow` must hold."""
        return self.root if "://" in self.root else f"model://{Path(self.root).resolve()}"


class PluginSync(PluginConfig, PublishConfig):
    """A transport of an installed package (entry point `headway.weight_transports`)."""

    origin: str = Field(min_length=1)
    """Directory or URL prefix that a server's `weights.allow` must hold."""


def _bracketed(host: str) -> str:
    """Return a host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def _disk_unless_named(given: object) -> object:
    return {"type": "disk", **given} if isinstance(given, dict) else given


WeightSyncConfig = Annotated[
    Annotated[
        DiskSync | SharedMemorySync | HttpSync | CollectiveSync | CheckpointSync | PluginSync,
        Field(discriminator="type"),
    ],
    BeforeValidator(_disk_unless_named),
]


class ReceiverConfig(Config):
    """Places from which a server takes versions."""

    allow: tuple[str, ...] = ()
    """Directories and URL prefixes from which versions may come; none refuses every publication.
    Process groups are allowed by `gloo:`, `nccl:` or `ipc:`."""
    peers: bool = True
    """Also fetch from generation servers that the gateway names, and serve them what this one holds."""
    cache_dir: str | None = None
    """Directory for versions that an engine has to read as files (SGLang, vLLM) but that do not come
    as such, and for directories that are fetched from an object store; None takes one below the
    system's temporary directory."""
    token_env: EnvironmentName | None = None
    """Environment variable with the bearer token for fetching over HTTP."""
    num_connections: int = Field(default=4, ge=1, le=64)
    """Connections at once when fetching over HTTP."""
    on_device: bool = True
    """Hold what comes to a GPU over NCCL or handles there, and serve it from there; false brings it to
    the host first. Engines that read files get it by the host always."""
    stage_timeout_s: float = Field(default=300.0, gt=0.0)
    """Seconds without any progress after which staging is given up."""
