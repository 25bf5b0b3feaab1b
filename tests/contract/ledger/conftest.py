"""Every ledger passes this suite; another store joins by one line in `address`."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.ledger.base import Ledger
from gateway.ledger.make import make_ledger
from tests.unit.gateway.ledger_suite import STORES, Play, RedisServer

OpenLedger = Callable[..., Awaitable[Ledger]]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.running() as server:
        yield server


@pytest.fixture(params=STORES)
def store(request) -> str:
    return request.param


@pytest.fixture
def address(store: str, tmp_path: Path, request) -> str:
    """A new, empty ledger."""
    if store == "redis":
        return request.getfixturevalue("redis_server").address()
    return ":memory:" if store == "sqlite-memory" else str(tmp_path / "ledger.sqlite")


@pytest.fixture
async def open_ledger(address: str) -> AsyncIterator[OpenLedger]:
    """Opens this test's ledger, as one of its owners; it is closed at the end, or by the test."""
    async with AsyncExitStack() as stack:

        async def opened(owner: str = "one", lease_s: float = 30.0) -> Ledger:
            ledger = make_ledger(address)
            await ledger.open(owner, lease_s)
            stack.push_async_callback(ledger.close)
            return ledger

        yield opened


@pytest.fixture
async def ledger(open_ledger: OpenLedger) -> Ledger:
    return await open_ledger()


@pytest.fixture
async def play(ledger: Ledger) -> AsyncIterator[Play]:
    play = Play(ledger)
    yield play
    await play.check()
