"""`headway ledger stats`."""

from __future__ import annotations

import sys

from gateway.ledger.base import LedgerReader


async def stats(ledger: LedgerReader, consumer: str | None, audit: bool) -> None:
    """Print the counts, and their audit if it is asked for."""
    counts = await ledger.counts(consumer)
    sys.stdout.write(counts.model_dump_json(indent=1) + "\n")
    if audit:
        sys.stdout.write((await ledger.audit()).model_dump_json(indent=1) + "\n")
