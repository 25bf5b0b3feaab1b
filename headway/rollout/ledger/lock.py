"""Keeps a second gateway from an SQLite ledger: it would requeue what the first one plays."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.contracts.errors import ConfigError


@contextmanager
def sole_gateway(ledger: str) -> Iterator[None]:
    """Hold an SQLite ledger until the block, or this process, ends.

    Args:
        ledger: its path; `:memory:` and URLs need no lock.
    Raises:
        ConfigError: another gateway of this machine holds it.
    """
    if ledger == ":memory:" or "://" in ledger:
        yield
        return
    path = Path(ledger + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another gateway has the ledger {ledger} open; name another file, or let both share "
                "one on Redis (ledger: redis://...)"
            ) from error
        yield
