"""The ledgers that pass the shared suite, and the calls that most of its tests begin with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout_builders import make_group, make_request

from headway.rollout.ledger.base import Delivery, LeaseLimits, Ledger
from headway.rollout.ledger.sqlite import SqliteLedger


@dataclass(frozen=True)
class Store:
    name: str
    make: Callable[[Path], Ledger]
    """A ledger on the store in this folder; the same folder is the same store."""
    is_durable: bool


STORES = [
    Store("sqlite-file", lambda folder: SqliteLedger(str(folder / "ledger.sqlite")), True),
    Store("sqlite-memory", lambda folder: SqliteLedger(":memory:"), False),
]
UNBOUNDED = LeaseLimits(consumer=None, bounded=0, free=10**6)


class Play:
    """A ledger with the calls that most tests begin with."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def submit(self, *rollout_ids: str, size: int = 2, consumer: str = "default") -> None:
        requests = [make_request(name, size, consumer=consumer) for name in rollout_ids]
        await self.ledger.submit(requests, max_queued=10**6)

    async def lease_all(self) -> list[str]:
        leased = []
        while (lease := await self.ledger.lease(UNBOUNDED, version=0)) is not None:
            leased.append(lease.request.rollout_id)
        return leased

    async def finish(
        self, *rollout_ids: str, size: int = 2, version: int = 0, consumer: str = "default"
    ) -> None:
        """Submit, lease and complete."""
        await self.submit(*rollout_ids, size=size, consumer=consumer)
        await self.lease_all()
        for name in rollout_ids:
            await self.ledger.complete(make_group(name, size, version))

    async def deliver(
        self,
        count: int = 1,
        delivery_id: str = "d0",
        consumer: str = "default",
        rollout_ids: list[str] | None = None,
        version: int = 0,
        max_staleness: int | None = None,
    ) -> Delivery:
        return await self.ledger.deliver(
            delivery_id, count, consumer, rollout_ids, version, max_staleness
        )
