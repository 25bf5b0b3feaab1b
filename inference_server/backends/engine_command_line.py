"""The command that starts an engine: our flags under the user's, a free port, an environment."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import JsonValue

from headway.contracts.config.server import EngineProcessConfig
from headway.contracts.errors import BackendError, ConfigError

LOOPBACK = "127.0.0.1"
PORT_FLAG = "--port"
GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT = 20_000
"""Above the ports that services, and Ray's workers, have by default."""
PORT_TRIES = 100


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """Command that starts one kind of engine: `python -m module` with our flags under the user's."""

    name: str
    """Name of the engine in messages."""
    module: str
    args: Mapping[str, JsonValue]
    """Flags that we set; those of the user's config win."""
    ready_path: str
    """Answers 200 once requests are served."""
    env: Mapping[str, str] = field(default_factory=dict)
    owned_flags: Mapping[str, str] = field(default_factory=dict)
    """Flags that the user must not set, each with the setting of ours to use instead."""


def engine_command_line(
    config: EngineProcessConfig, command: EngineCommand
) -> tuple[list[str], int]:
    """The command that starts an engine, and the port that it will serve.

    Raises:
        ConfigError: the flags cannot be passed on, or the engine is not installed.
    """
    for flag, setting in command.owned_flags.items():
        if flag in config.args:
            raise ConfigError(f"backend.args sets {flag}; set {setting} instead")
    args = {"--host": LOOPBACK, PORT_FLAG: _free_port(), **command.args, **config.args}
    port = args[PORT_FLAG]
    if not isinstance(port, int):
        raise ConfigError(f"backend.args: --port is {port!r}, needs a number")
    python = config.python or sys.executable
    package = command.module.partition(".")[0]
    has_path = "PYTHONPATH" in {**command.env, **config.env}
    if python == sys.executable and not has_path and find_spec(package) is None:
        raise ConfigError(
            f"{command.name} is not installed in {python} (no module {package}); install it "
            f"(extra {package}), set backend.python to an interpreter that has it, or backend.url to "
            "an engine that runs"
        )
    return [python, "-m", command.module, *command_flags(args)], port


def engine_environment(config: EngineProcessConfig, command: EngineCommand) -> dict[str, str]:
    """What an engine's environment has beside ours; it must not import files of our working directory."""
    return {"PYTHONSAFEPATH": "1", **command.env, **config.env}


def command_flags(args: Mapping[str, JsonValue]) -> list[str]:
    """A mapping of flags as a command line.

    `true` is a bare flag, `false` or null leaves it out, a list repeats values after the flag, a
    mapping is written as JSON.

    Raises:
        ConfigError: a key is not a flag.
    """
    line: list[str] = []
    for flag, value in args.items():
        if not flag.startswith("-") or "=" in flag or " " in flag:
            raise ConfigError(f"backend.args: {flag!r} is not a flag; write it like --tp-size")
        if value is None or value is False:
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        line += [flag, *(one if isinstance(one, str) else json.dumps(one) for one in values)]
    return line


def is_served(url: str) -> bool:
    """Whether anybody accepts connections there."""
    place = urlsplit(url)
    try:
        with socket.create_connection((place.hostname, place.port), timeout=1.0):
            return True
    except OSError:
        return False


def _free_port() -> int:
    """A port below those that the kernel gives out by itself: an engine binds it minutes later,
    once its model is loaded, and nobody else has it by then."""
    end = int(GIVEN_PORTS.read_text().split()[0])
    low = range(FIRST_PORT, end) or range(0, 1)
    for port in random.SystemRandom().sample(low, min(PORT_TRIES, len(low))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return int(probe.getsockname()[1])
    raise BackendError(
        f"no port from {FIRST_PORT} to {end - 1} is free for an engine; set --port in backend.args"
    )
