"""Every ledger passes this suite; another store joins by one line in `ledger_suite.STORES`."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from ledger_suite import STORES, Play, Store

from headway.rollout.ledger.base import Ledger


@pytest.fixture(params=STORES, ids=lambda store: store.name)
def store(request) -> Store:
    return request.param


@pytest.fixture
async def open_ledger(store: Store, tmp_path: Path) -> AsyncIterator[Callable]:
    """Opens a ledger on this test's store; a second call is the process after a restart."""
    async with AsyncExitStack() as stack:

        async def opened() -> Ledger:
            await stack.aclose()
            ledger = store.make(tmp_path)
            await ledger.open()
            stack.push_async_callback(ledger.close)
            return ledger

        yield opened


@pytest.fixture
async def ledger(open_ledger) -> Ledger:
    return await open_ledger()


@pytest.fixture
async def play(ledger: Ledger) -> Play:
    return Play(ledger)
