"""Calls that the SQLite ledger commits together."""

from __future__ import annotations

import asyncio

from gateway.ledger.records import Capacity
from gateway.ledger.sqlite import SqliteLedger
from tests.unit.gateway.rollout_builders import make_request


async def test_calls_that_are_committed_together_see_one_another():
    """What one call did is seen by a reading that came in the same moment."""
    ledger = SqliteLedger(":memory:")
    await ledger.open("me", 30.0)
    for number in range(20):
        name = f"r{number}"
        _, leases, audit, events, revision = await asyncio.gather(
            ledger.submit([make_request(name, consumer=f"c{number}")], 10**6),
            ledger.lease(Capacity(version=0, free=10**6)),
            ledger.audit(),
            ledger.events(name),
            ledger.revision(),
        )
        assert [lease.rollout_id for lease in leases] == [name]
        assert (audit.lost, audit.duplicated) == (0, 0)
        assert [event.event for event in events] == ["submit", "lease"]
        assert revision == await ledger.revision()
    await ledger.close()
