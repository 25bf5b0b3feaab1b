"""A small service behind the listener's real protocol, in a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import APIRouter, FastAPI, Request

from headway.contracts.config.gateway import ServiceConfig
from headway.runtime.access import Access
from headway.runtime.http_service import create_service
from headway.runtime.json_route import JsonRoute
from headway.runtime.limits import limited_protocol
from headway.runtime.tls import server_options

ECHO = "/echo"


@asynccontextmanager
async def no_lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield


def echo_app(access: Access | None = None) -> FastAPI:
    """Answers with the number of bytes of a body."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(ECHO)
    async def echo(request: Request) -> int:
        return len(await request.body())

    app = create_service("echo", no_lifespan, 1 << 20, access)
    app.include_router(router)
    return app


@contextmanager
def served(config: ServiceConfig, app: FastAPI | None = None) -> Iterator[int]:
    """The port of a service with the limits and the TLS of a config."""
    app = app or echo_app()
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        app.state.url = "http://{}:{}".format(*listener.getsockname())
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=limited_protocol(config),
                ws="none",
                log_config=None,
                timeout_graceful_shutdown=1,
                **server_options(config.tls),
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()
