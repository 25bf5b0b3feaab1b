"""A ledger, read by a command while others work with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from gateway.ledger.make import make_ledger
from headway.contracts.errors import ConfigError


def visit(name: str, run: Callable[..., Awaitable[None]], arguments: Sequence[object]) -> None:
    """Run a command on a ledger.

    Args:
        run: takes the ledger and the arguments.
    Raises:
        ConfigError: no ledger is there; none is made.
    """
    if "://" not in name and not Path(name).is_file():
        raise ConfigError(f"no ledger at {name!r}; name one with --ledger")
    asyncio.run(_visit(name, run, arguments))


async def _visit(
    name: str, run: Callable[..., Awaitable[None]], arguments: Sequence[object]
) -> None:
    ledger = make_ledger(name)
    await ledger.connect()
    try:
        await run(ledger, *arguments)
    finally:
        await ledger.close()
