"""What each process of a run is configured with: its section of the run's file, and what it has to know
of the others."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from headway.contracts.config.experiment import RolloutExperiment
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.config.weight_sync import HttpSync, ReceiverConfig

ServedT = TypeVar("ServedT", GatewayConfig, ServerConfig)


def gateway_config(config: LaunchConfig, ready_file: Path | None) -> GatewayConfig:
    """Return the gateway's; it knows the servers' token."""
    token_env = config.server.service.env_for("admin")
    fleet = config.gateway.fleet.model_copy(update={"token_env": token_env})
    return _served(config.gateway.model_copy(update={"fleet": fleet}), ready_file)


def server_config(config: LaunchConfig, url: str | None, ready_file: Path | None) -> ServerConfig:
    """Return a server's.

    Args:
        url: the gateway's; None is told when the server is started.
    """
    changes = {
        "gateway": url,
        "gateway_token_env": config.gateway.service.env_for("server"),
        "weights": _receiver(config),
    }
    return _served(config.server.model_copy(update=changes), ready_file)


def trainer_config(
    config: LaunchConfig, url: str | None, resumes: bool = False
) -> RolloutExperiment:
    """Return the trainer's.

    Args:
        url: the gateway's; None is told when the trainer is started.
        resumes: it goes on from its newest checkpoint, if there is one, whatever its configuration says.
    """
    given, recovery = config.trainer.rollout, config.trainer.recovery
    changes = {
        "token_env": config.gateway.service.env_for("consume"),
        # It may be up before the first server is.
        "connect_timeout_s": max(given.connect_timeout_s, config.start_timeout_s),
    }
    rollout = given.model_copy(update=changes if url is None else {"url": url, **changes})
    if resumes:
        recovery = recovery.model_copy(update={"mode": "auto"})
    return config.trainer.model_copy(update={"rollout": rollout, "recovery": recovery})


def _receiver(config: LaunchConfig) -> ReceiverConfig:
    """Return the places from which servers may take weights: our trainer, and whatever else they were
    given."""
    weights, sync = config.server.weights, config.trainer.weight_sync
    allow = tuple(dict.fromkeys((*weights.allow, sync.origin)))
    token_env = sync.token_env if isinstance(sync, HttpSync) else None
    return weights.model_copy(update={"allow": allow, "token_env": weights.token_env or token_env})


def _served(config: ServedT, ready_file: Path | None) -> ServedT:
    """The config with a ready file of this run."""
    name = None if ready_file is None else str(ready_file)
    service = config.service.model_copy(update={"ready_file": name})
    return config.model_copy(update={"service": service})
