"""Serving an app: bind, announce readiness, drain on a signal, end."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import math
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from headway.contracts.config.gateway import ServiceConfig
from headway.contracts.errors import ConfigError
from headway.runtime.limits import limited_protocol
from headway.runtime.tasks import cancel_and_wait
from headway.runtime.tls import server_options

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[Any]]
Drain = Callable[[], Coroutine[Any, Any, None]]
KEEP_ALIVE_S = 75
FLUSH_S = 1
"""Seconds for answers on their way out, after a drain."""
TICK_S = 0.05
GARBAGE = (20_000, 20, 100)
"""Objects, and rounds, after which the garbage collector looks for cycles: next to nothing that a request
leaves behind is one, and the default of 700 objects looks several times per request (a tenth of the
CPU)."""
OTHER_FILES = 1024
"""File descriptors for everything but incoming connections."""
SILENT = logging.Logger("silent", logging.CRITICAL + 1)
"""Writes nothing. No configuration of logging finds it: `dictConfig` would enable a known logger."""


def serve(app: FastAPI, config: ServiceConfig, drain: Drain | None = None) -> None:
    """Bind, serve until SIGTERM or SIGINT, and announce readiness in `config.ready_file`.

    A first signal calls `drain`, while requests are still served; a second one ends it at once.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's, or the whole network would
            be let in without a token.
        Exception: whatever kept the app from starting.
    """
    check_exposure(config)
    tls = server_options(config.tls)
    listener = _bind(config)
    _allow_files(config.max_connections + OTHER_FILES)
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    starting = _Starting(app.router.lifespan_context)
    app.router.lifespan_context = starting.lifespan
    server = _AnnouncingServer(
        uvicorn.Config(
            app,
            http=limited_protocol(config),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(
                config.drain_timeout_s if drain is None else FLUSH_S
            ),
            **tls,
        ),
        url=f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}",
        ready_file=Path(config.ready_file) if config.ready_file else None,
        drain=drain,
        starting=starting,
    )
    app.state.url = server.url
    gc.set_threshold(*GARBAGE)
    gc.freeze()  # what exists by now stays: the garbage collector need not look at it
    with listener:
        try:
            server.run(sockets=[listener])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise _port_taken(config) from error  # by who started at the same time


def check_exposure(config: ServiceConfig) -> None:
    """Refuse to let the network in without a token, unless that is meant.

    Raises:
        ConfigError: `host` is beyond loopback, and neither a token nor `allow_anonymous` is set.
    """
    has_tokens = config.token_env is not None or config.tokens
    if has_tokens or config.allow_anonymous or _is_loopback(config.host):
        return
    raise ConfigError(
        f"service.host={config.host} is beyond loopback, and no token is asked for: anyone who reaches "
        "the port could do everything; set service.token_env or service.tokens, or, on a network of your "
        "own, service.allow_anonymous"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Starting:
    """Keeps what an app raises while it starts: uvicorn would log its traceback, and say no more."""

    def __init__(self, lifespan: Lifespan) -> None:
        self._lifespan = lifespan
        self.failure: Exception | None = None

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[Any]:
        """The app's own."""
        async with AsyncExitStack() as stack:
            try:
                state = await stack.enter_async_context(self._lifespan(app))
            except Exception as error:
                self.failure = error
                raise
            yield state


class _AnnouncingServer(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        url: str,
        ready_file: Path | None,
        drain: Drain | None,
        starting: _Starting,
    ) -> None:
        super().__init__(config)
        self.url = url
        self._ready_file = ready_file
        self._drain = drain
        self._starting = starting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        giving_up = asyncio.create_task(self._give_up(asyncio.current_task()), name="give up")
        logger, self.lifespan.logger = self.lifespan.logger, SILENT
        try:
            await super().startup(sockets)
        except SystemExit:
            if not (self.should_exit or self._starting.failure):
                raise
        finally:
            giving_up.cancel()
            self.lifespan.logger = logger
        if self.should_exit:
            return  # it was told to end, and what it had opened is closed
        if self._starting.failure:
            raise self._starting.failure
        if any(
            listener.fileno() < 0 for listener in sockets or ()
        ):  # all that uvloop lets one know
            await self.shutdown(sockets)
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        if self.started and self._ready_file:
            partial = self._ready_file.with_suffix(".partial")
            partial.write_text(json.dumps({"url": self.url, "pid": os.getpid()}))
            partial.replace(self._ready_file)

    async def _give_up(self, main: asyncio.Task[Any] | None) -> None:
        """End an app that is still starting once a signal came.

        Not before its task has begun: uvicorn would wait for ever for one that was cancelled unbegun.
        """
        await asyncio.sleep(TICK_S)
        while not self.should_exit:  # noqa: ASYNC110 - a signal's handler can set no event
            await asyncio.sleep(TICK_S)
        for task in asyncio.all_tasks() - {main, asyncio.current_task()}:
            task.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._drain is not None:
            draining = asyncio.create_task(self._drain(), name="drain")
            while not (draining.done() or self.force_exit):
                await asyncio.wait((draining,), timeout=TICK_S)
            await cancel_and_wait([draining])
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # the second signal, of whatever kind
        super().handle_exit(sig, frame)


def _bind(config: ServiceConfig) -> socket.socket:
    """Take the port; connections are refused until the app is up, so that clients go to another one."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise _port_taken(config) from error
        raise ConfigError(f"cannot bind {config.host}:{config.port}: {error.strerror}") from error
    return listener


def _port_taken(config: ServiceConfig) -> ConfigError:
    return ConfigError(
        f"port {config.port} on {config.host} is in use; stop the other process or set "
        "service.port (0 takes a free one)"
    )


def _allow_files(wanted: int) -> None:
    """Many systems let a process have 1024 files at first, and more when it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
