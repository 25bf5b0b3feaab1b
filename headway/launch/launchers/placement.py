"""Placement on GPUs: each process of a run on this machine gets as many as it asks for, and no
other process's.

A process sees its own devices alone (CUDA_VISIBLE_DEVICES). The ranks of a trainer see those of their
group, and each takes one of them by its LOCAL_RANK. A machine without GPUs, and a pool that is empty by
CUDA_VISIBLE_DEVICES, change nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import (
    BackendConfig,
    EmbeddedTorchConfig,
    EngineProcessConfig,
    FakeBackendConfig,
    PluginBackendConfig,
    ServerConfig,
)
from headway.contracts.errors import ConfigError
from headway.runtime.gpus import ORDER, VISIBLE, GpuSurvey, visible_devices

TRAINER = "trainer"
GATEWAY = "gateway"
FACTORS = (
    ("--tensor-parallel-size", "--tp-size", "--tp", "-tp"),
    ("--pipeline-parallel-size", "--pp-size", "--pp", "-pp"),
    ("--data-parallel-size", "--dp-size", "--dp", "-dp"),
)
"""Flags of SGLang and vLLM whose product is the number of GPUs of an engine."""
DP_WITHIN_TP = "--enable-dp-attention"
"""SGLang's data-parallel attention runs on the GPUs of tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of each process."""

    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of devices by name of process; empty on a machine without GPUs."""
    keeps_order: bool = True
    """True if indices mean what they meant in the launcher's own environment."""

    def environment(self, process: str) -> dict[str, str]:
        """Return the variables that a process gets besides the launcher's environment."""
        if process not in self.devices:
            return {}
        given = {VISIBLE: ",".join(self.devices[process])}
        return given if self.keeps_order else {**given, ORDER: "PCI_BUS_ID"}


@dataclass(frozen=True, slots=True)
class _Request:
    process: str
    num_gpus: int
    why: str


def place(config: LaunchConfig, survey: GpuSurvey, environ: Mapping[str, str]) -> Placement:
    """Give every process its devices: the trainer's ranks first, then server after server.

    Args:
        environ: the launcher's; its CUDA_VISIBLE_DEVICES is the pool.
    Raises:
        ConfigError: there are too few; or none, and a process is to run on one.
    """
    pool = visible_devices(survey, environ)
    if len(set(pool)) < len(pool):
        raise ConfigError(f"{VISIBLE}={environ[VISIBLE]} names a GPU twice; name each once")
    if not pool:
        _refuse_cuda(config, survey, environ)
        return Placement()
    own = _own_devices(config)
    pool = tuple(name for name in pool if name not in own)
    requests = list(_requests(config))
    wanted = sum(request.num_gpus for request in requests)
    shares = config.share_gpus and wanted > len(pool)
    if wanted > len(pool) and (not shares or any(r.num_gpus > len(pool) for r in requests)):
        raise ConfigError(_shortage(requests, wanted, pool, environ))
    places = itertools.cycle(pool)
    devices = {r.process: tuple(itertools.islice(places, r.num_gpus)) for r in requests}
    left = () if shares else pool[wanted:]
    return Placement({**devices, GATEWAY: left}, keeps_order=VISIBLE in environ or ORDER in environ)


def gpus_of_backend(backend: BackendConfig) -> int:
    """Number of GPUs that one generation server asks for where there are some."""
    if isinstance(backend, FakeBackendConfig):
        return 0
    if isinstance(backend, PluginBackendConfig):
        return backend.num_gpus
    if isinstance(backend, EmbeddedTorchConfig):
        return int(backend.device != "cpu")
    if backend.url is not None or backend.args.get("--device") == "cpu" or VISIBLE in backend.env:
        return 0
    within = len(FACTORS) - bool(backend.args.get(DP_WITHIN_TP))
    num_gpus = 1
    for flags in FACTORS[:within]:
        num_gpus *= max((_number(backend.args.get(flag), flag) for flag in flags), default=1)
    return max(num_gpus // _number(backend.args.get("--nnodes"), "--nnodes"), 1)


def gpus_of_server(server: ServerConfig) -> int:
    """Number of GPUs that a generation server asks a scheduler for; ours does if it is to run on one."""
    if isinstance(server.backend, EmbeddedTorchConfig):
        return int(server.backend.device == "cuda")
    return gpus_of_backend(server.backend)


def _requests(config: LaunchConfig) -> Iterator[_Request]:
    ranks, each = config.num_trainer_ranks, gpus_of_backend(config.server.backend)
    per_rank = int(config.trainer.trainer.device != "cpu")
    yield _Request(TRAINER, ranks * per_rank, f"{ranks} trainer ranks with {per_rank} each")
    why = f"{config.num_servers} servers ({config.server.backend.type}) with {each} each"
    for number in range(config.num_servers):
        yield _Request(f"server-{number}", each, why)


def _shortage(
    requests: Sequence[_Request], wanted: int, pool: Sequence[str], environ: Mapping[str, str]
) -> str:
    roles = ", ".join(dict.fromkeys(request.why for request in requests))
    there = f"{VISIBLE}={environ[VISIBLE]} leaves" if VISIBLE in environ else "this machine has"
    return (
        f"the processes of this run want {wanted} GPUs ({roles}), and {there} {len(pool)}"
        f" ({', '.join(pool) or 'none'}); lower num_trainer_ranks or num_servers, set "
        "trainer.trainer.device or server.backend.device to cpu, or set share_gpus=true to let servers "
        "run on GPUs that others have"
    )


def _refuse_cuda(config: LaunchConfig, survey: GpuSurvey, environ: Mapping[str, str]) -> None:
    """Refuse to run on a GPU where there is none; `auto` is decided by each process itself."""
    backend = config.server.backend
    named = {
        "trainer.trainer.device": config.trainer.trainer.device,
        "server.backend.device": getattr(backend, "device", "auto"),
    }
    wrong = [name for name, device in named.items() if device == "cuda"]
    if wrong:
        seen = f", and {VISIBLE}={environ[VISIBLE]}" if VISIBLE in environ else ""
        raise ConfigError(
            f"{' and '.join(wrong)} is cuda; this machine has {survey.describe()}{seen}; "
            "run where there is one, or set it to cpu"
        )


def _own_devices(config: LaunchConfig) -> frozenset[str]:
    """Devices that the engine's own environment names: nobody else's."""
    backend = config.server.backend
    named = backend.env.get(VISIBLE, "") if isinstance(backend, EngineProcessConfig) else ""
    return frozenset(part.strip() for part in named.split(",") if part.strip())


def _number(value: JsonValue, flag: str) -> int:
    if value is None:
        return 1
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"server.backend.args {flag} is {value!r}; give the number of GPUs")
    return number
