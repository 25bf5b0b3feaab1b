"""A later node of an SGLang engine that spans several machines: the engine's own process there.

The first node has the server, and starts its part of the engine. The other nodes have the same settings
and another `--node-rank`; they run their part with the same flags, and nothing of ours beside it.
"""

from __future__ import annotations

import logging
import os
from typing import NoReturn, TypeGuard

from headway.contracts.config.server import BackendConfig, ServerConfig, SGLangConfig
from headway.contracts.errors import ConfigError
from inference_server.backends.engine_command_line import engine_command_line, engine_environment
from inference_server.backends.sglang.features import sglang_command
from inference_server.default_dtype import settled_model
from inference_server.engine import has_tokenizer

log = logging.getLogger(__name__)

RANK = "--node-rank"


def is_later_node(backend: BackendConfig) -> TypeGuard[SGLangConfig]:
    """True unless this is where the server runs.

    Raises:
        ConfigError: the rank is no number.
    """
    if not isinstance(backend, SGLangConfig):
        return False
    rank = backend.args.get(RANK, 0)
    if not isinstance(rank, int):
        raise ConfigError(f"backend.args: {RANK} is {rank!r}, needs a number")
    return rank > 0


def run_node(config: ServerConfig, backend: SGLangConfig) -> NoReturn:
    """Become the engine's process of this node.

    Raises:
        ConfigError: the flags cannot be passed on, or the engine is not installed.
    """
    version, model = config.initial_version, settled_model(config)
    command = sglang_command(backend, model, version, has_tokenizer(config))
    argv, _ = engine_command_line(backend, command)
    log.info("a node of an engine", extra={"engine": command.name, "rank": backend.args[RANK]})
    try:
        os.execvpe(argv[0], argv, {**os.environ, **engine_environment(backend, command)})
    except OSError as error:
        raise ConfigError(f"cannot start {argv[0]}: {error.strerror}") from error
