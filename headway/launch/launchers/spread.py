"""A run over several machines, which share a file system: what it must be, and what changes."""

from __future__ import annotations

from pathlib import Path

from headway.contracts.config.gateway import ServiceConfig
from headway.contracts.config.launch import LaunchConfig, shared_root
from headway.contracts.config.server import ServerConfig
from headway.contracts.config.weight_sync import CollectiveSync, DiskSync, SharedMemorySync
from headway.contracts.errors import ConfigError
from headway.runtime.listener import check_exposure


def spread(config: LaunchConfig) -> LaunchConfig:
    """Let versions go where other machines reach them.

    Raises:
        ConfigError: the run cannot be spread over machines.
    """
    trainer = config.trainer
    sync, run_dir = trainer.weight_sync, trainer.run_dir
    if isinstance(sync, SharedMemorySync) and sync.root == shared_root(run_dir):  # by default
        root = str(Path(run_dir).resolve() / "weights")
        sync = DiskSync(**sync.model_dump(exclude={"type", "root"}), root=root)
    if not isinstance(sync, DiskSync | CollectiveSync):
        raise ConfigError(
            f"trainer.weight_sync.type={sync.type} reaches no server on another machine; take "
            "disk (below a shared run folder) or collective"
        )
    for name, service in (("gateway", config.gateway.service), ("server", config.server.service)):
        _check_exposure(name, service)
    return config.model_copy(update={"trainer": trainer.model_copy(update={"weight_sync": sync})})


def allow_any_host(config: LaunchConfig, server: ServerConfig) -> ServerConfig:
    """A server's, which takes broadcasts of whichever machine is the trainer's first."""
    sync = config.trainer.weight_sync
    if not isinstance(sync, CollectiveSync):
        return server
    allow = (*config.server.weights.allow, f"{sync.backend}:")
    return server.model_copy(update={"weights": server.weights.model_copy(update={"allow": allow})})


def _check_exposure(name: str, service: ServiceConfig) -> None:
    try:
        check_exposure(service.model_copy(update={"host": "0.0.0.0"}))
    except ConfigError as error:
        raise ConfigError(f"{name}.service is to be reached from other machines: {error}") from None
