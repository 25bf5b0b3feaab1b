"""Keeps a second gateway from an SQLite ledger: it would requeue what the first one runs."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from headway.contracts.errors import ConfigError


def _opened(ledger: str) -> TextIO:
    path = Path(ledger + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a")
    except OSError as error:
        raise ConfigError(
            f"the folder of ledger {ledger} cannot be written: {error}; name a file in another one"
        ) from error


@contextmanager
def sole_gateway(ledger: str) -> Iterator[None]:
    """Hold an SQLite ledger until the block, or this process, ends.

    Args:
        ledger: its path; `:memory:` and URLs need no lock.
    Raises:
        ConfigError: another gateway of this machine holds it, or its folder cannot be written.
    """
    if ledger == ":memory:" or "://" in ledger:
        yield
        return
    with _opened(ledger) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another gateway has the ledger {ledger} open; name another file, or let both share "
                "one on Redis (ledger: redis://...)"
            ) from error
        yield
