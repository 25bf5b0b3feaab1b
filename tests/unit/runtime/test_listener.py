"""Serving an app: what callers see before it is up."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from fastapi import FastAPI

from headway.contracts.config.gateway import ServiceConfig
from headway.contracts.errors import ConfigError, StoreUnusable
from headway.runtime.listener import serve


def test_connections_are_refused_until_the_app_is_up():
    """Who may go to another service is not kept waiting by one that starts."""
    seen = []

    @asynccontextmanager
    async def starting(app: FastAPI) -> AsyncIterator[None]:
        url = httpx.URL(app.state.url)
        with pytest.raises(ConnectionRefusedError) as refused:
            await asyncio.open_connection(url.host, url.port)
        seen.append(refused)
        raise RuntimeError("enough was seen")
        yield

    with pytest.raises(RuntimeError):
        serve(FastAPI(lifespan=starting), ServiceConfig())
    assert seen


@pytest.mark.parametrize("failure", [StoreUnusable("no ledger"), ZeroDivisionError("a bug")])
def test_what_keeps_an_app_from_starting_is_raised_and_not_logged(failure, caplog):
    @asynccontextmanager
    async def starting(app: FastAPI) -> AsyncIterator[None]:
        raise failure
        yield

    with pytest.raises(type(failure), match=str(failure)) as raised:
        serve(FastAPI(lifespan=starting), ServiceConfig())
    assert raised.value is failure
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_signal_ends_an_app_that_is_still_starting(caplog):
    """It waits for a store, or for an engine: what it had opened is closed, and nothing is served."""
    closed = []

    @asynccontextmanager
    async def starting(app: FastAPI) -> AsyncIterator[None]:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            closed.append(app.title)
        yield

    with suppress(KeyboardInterrupt):
        serve(FastAPI(title="starting", lifespan=starting), ServiceConfig())
    assert closed == ["starting"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_signal_that_comes_before_the_app_starts_ends_it_too(caplog):
    class Signaller(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("Started server process"):
                signal.raise_signal(signal.SIGINT)

    @asynccontextmanager
    async def starting(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    logger, handler = logging.getLogger("uvicorn.error"), Signaller()
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, logger.name), suppress(KeyboardInterrupt):
            serve(FastAPI(lifespan=starting), ServiceConfig())
    finally:
        logger.removeHandler(handler)
    assert [record for record in caplog.records if "Started server" in record.getMessage()]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_of_two_that_start_on_a_port_at_once_the_second_is_told():
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        port = first.getsockname()[1]

        @asynccontextmanager
        async def starting(app: FastAPI) -> AsyncIterator[None]:
            first.listen()
            yield

        with pytest.raises(ConfigError, match=f"port {port} .* is in use"):
            serve(FastAPI(lifespan=starting), ServiceConfig(port=port))
