"""The transports by name, and which of them brings a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.contracts.config.weight_sync import PluginSync, PublishConfig, ReceiverConfig
from headway.contracts.errors import SyncError
from headway.contracts.http.paths import WEIGHTS_HELD
from headway.contracts.registry import Registry
from headway.contracts.types import WeightUpdateMeta
from headway.runtime.object_stores import is_url
from headway.runtime.plugins import plugin_args
from weight_sync.channel import Source, WeightChannel, WeightPublisher
from weight_sync.deadline import Deadline

TRANSPORTS: Registry[WeightChannel] = Registry(
    "weight transport",
    {
        "disk": "weight_sync.transports.disk:CHANNEL",
        "shared_memory": "weight_sync.transports.shared_memory:CHANNEL",
        "http": "weight_sync.transports.http:CHANNEL",
        "collective": "weight_sync.transports.collective:CHANNEL",
        "checkpoint": "weight_sync.transports.checkpoint:CHANNEL",
    },
    entry_point_group="headway.weight_transports",
)
SCHEMES = {
    "": "disk",
    "shm": "shared_memory",
    "http": "http",
    "https": "http",
    "gloo": "collective",
    "nccl": "collective",
    "ipc": "collective",
    "model": "checkpoint",
}
"""Scheme of a path -> transport; every other scheme is an installed package's, or fsspec's and so of
the transport `disk`.
"""
MODEL_SCHEME = "model"
"""Scheme of a directory as Hugging Face's libraries save a model, without a manifest of ours."""
_LOCAL = ("", "file", "shm", MODEL_SCHEME)
_PEER_MARK = WEIGHTS_HELD.partition("{")[0]


def make_publisher(config: Any) -> WeightPublisher:
    """The trainer's end that `config.type` names; a plug-in by its name.

    Raises:
        UnknownName: no installed package registers the plug-in.
        ConfigError: its arguments do not fit.
    """
    if isinstance(config, PluginSync):
        channel = TRANSPORTS.get(config.name)
        shared = config.model_dump(include=set(PublishConfig.model_fields))
        return channel.make_publisher(plugin_args(channel, config, PublishConfig, shared))
    return TRANSPORTS.get(config.type).make_publisher(config)


def open_source(
    path: str, meta: WeightUpdateMeta, config: ReceiverConfig, deadline: Deadline
) -> Source:
    """A version at a path, by the transport that its scheme names.

    Raises:
        SyncError: the path is not allowed, or there is no version.
    """
    check_allowed(path, config)
    channel = TRANSPORTS.get(_transport_of(scheme_of(path)))
    return channel.open_source(path, meta, config, deadline)


def scheme_of(path: str) -> str:
    """Return the text before `:`; empty for a plain path."""
    head, colon, _ = path.partition(":")
    return head.lower() if colon and "/" not in head else ""


def _transport_of(scheme: str) -> str:
    """Return the name of the transport that brings paths of a scheme."""
    if scheme in SCHEMES:
        return SCHEMES[scheme]
    plugins = set(TRANSPORTS.names()) - set(SCHEMES.values())
    return next(
        (name for name in sorted(plugins) if scheme in TRANSPORTS.get(name).schemes), "disk"
    )


def local_path(path: str) -> Path | None:
    """The directory that a path names on this machine, if it does."""
    if scheme_of(path) not in _LOCAL:
        return None
    place = place_of(path)
    return None if is_url(place) else Path(place)


def place_of(path: str) -> str:
    """Return a path without the scheme in front of it; it may be a URL itself (`model://s3://…`)."""
    return path.partition("://")[2] if "://" in path else path


def check_allowed(path: str, config: ReceiverConfig) -> None:
    """Check that versions may come from there: links resolved, no way upwards in a URL.

    Raises:
        SyncError: they may not.
    """
    if not any(_is_below(path, allowed) for allowed in config.allow) and not (
        config.peers and _is_peer(path)
    ):
        raise SyncError(
            f"{path} is outside of what this server takes weights from: "
            f"{', '.join(config.allow) or 'nothing'}; add it to weights.allow"
        )


def _is_below(path: str, allowed: str) -> bool:
    folder, root = local_path(path), local_path(allowed)
    if (folder is None) != (root is None):
        return False
    if folder is not None and root is not None:
        return folder.resolve().is_relative_to(root.resolve())
    prefix = allowed if allowed.endswith(("/", ":")) else allowed + "/"
    if not path.startswith(prefix) or ".." in path.split("/"):
        return False
    # `http://host:` allows any port, not the password in `http://host:80@elsewhere`.
    port = path[len(prefix) :].partition("/")[0] if prefix.endswith(":") else ""
    return port == "" or (port.isascii() and port.isdecimal())


def _is_peer(path: str) -> bool:
    if scheme_of(path) not in ("http", "https"):
        return False
    _, _, rest = path.partition("://")
    _, slash, route = rest.partition("/")
    version = route[len(_PEER_MARK) - 1 :]
    is_number = version.isascii() and version.isdecimal()
    return (slash + route).startswith(_PEER_MARK) and is_number
