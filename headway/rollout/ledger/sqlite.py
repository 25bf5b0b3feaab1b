"""The ledger on one SQLite file (WAL): survives kill -9 of its process without losing a transition.

One worker thread holds the connection and commits all waiting calls together, so the event loop never
blocks. Other processes may open the same file: a command beside a running gateway, for example.
A power cut may lose the last moments (synchronous=NORMAL) but no note, never the file's integrity.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from functools import partial

from headway.contracts.codec import encode_groups
from headway.contracts.errors import StateError
from headway.contracts.http.ledger import LedgerAudit, LedgerCounts
from headway.contracts.http.rollouts import RolloutState
from headway.contracts.types import PolicyVersion, RolloutRequest, TrajectoryGroup
from headway.rollout.ledger.base import Admission, Delivery, Entry, Event, Lease
from headway.rollout.ledger.on_sqlite import delivery, ending, queueing, reading
from headway.rollout.ledger.on_sqlite.transaction import ALL, Transaction
from headway.rollout.ledger.on_sqlite.worker import BUSY_S, Worker
from headway.rollout.ledger.transitions import EventName, counts_of


class SqliteLedger:
    """`Ledger` on SQLite; `:memory:` keeps nothing beyond the process."""

    is_shared = False

    def __init__(self, path: str) -> None:
        self._path = path
        self._worker = Worker(path)

    async def connect(self) -> None:
        await self._worker.start()

    async def open(self, owner: str, lease_s: float) -> None:
        self._worker.owner, self._worker.lease_s = owner, lease_s
        await self.connect()
        await self._worker.call(
            lambda transaction: queueing.requeue_leased(transaction, "the gateway restarted"),
            "write",
        )

    async def revision(self) -> int:
        return await self._worker.call(reading.revision, "read")

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        max_queued: int,
        max_queued_each: int | None = None,
    ) -> list[bool]:
        texts = [(request, request.model_dump_json()) for request in requests]
        return await self._worker.call(
            lambda transaction: queueing.submit(transaction, texts, max_queued, max_queued_each),
            "write",
        )

    async def lease(self, admission: Admission) -> list[Lease]:
        return await self._worker.call(
            lambda transaction: queueing.lease(transaction, admission), "write"
        )

    async def renew(self, keys: Collection[str]) -> set[str]:
        return await self._worker.call(
            lambda transaction: queueing.renew(transaction, keys), "write"
        )

    async def expire(self) -> int:
        return await self._worker.call(queueing.expire, "write")

    async def complete(self, lease: Lease, group: TrajectoryGroup) -> None:
        payload, mean, oldest = encode_groups([group]), group.mean_reward, group.oldest_version
        await self._worker.call(
            lambda transaction: queueing.complete(transaction, lease, oldest, mean, payload),
            "write",
        )

    async def drop_filtered(self, lease: Lease, reason: str, mean_reward: float) -> None:
        await self._end_attempt(lease, "filter", reason, mean_reward)

    async def fail(self, lease: Lease, reason: str) -> None:
        await self._end_attempt(lease, "fail", reason)

    async def requeue(self, lease: Lease, reason: str) -> None:
        await self._end_attempt(lease, "requeue", reason)

    async def _end_attempt(
        self, lease: Lease, event: EventName, reason: str, mean_reward: float | None = None
    ) -> None:
        await self._worker.call(
            lambda transaction: queueing.end_attempt(
                transaction, lease, event, reason, mean_reward
            ),
            "write",
        )

    async def deliver(
        self,
        delivery_id: str,
        count: int,
        consumer: str,
        version: PolicyVersion,
        max_staleness: int | None,
    ) -> Delivery:
        return await self._worker.call(
            lambda transaction: delivery.deliver(
                transaction, delivery_id, count, consumer, version, max_staleness
            ),
            "write",
        )

    async def deliver_exactly(
        self, delivery_id: str, rollout_ids: Sequence[str], version: PolicyVersion
    ) -> Delivery:
        return await self._worker.call(
            lambda transaction: delivery.deliver_exactly(
                transaction, delivery_id, rollout_ids, version
            ),
            "write",
        )

    async def outstanding(self, consumer: str) -> int:
        def groups(transaction: Transaction) -> int:
            states: tuple[RolloutState, ...] = ("queued", "leased", "ready")
            return sum(transaction.tally(state, consumer)[0] for state in states)

        return await self._worker.call(groups, "read")

    async def consume(self, rollout_ids: Sequence[str], step: int, checkpoint_step: int) -> None:
        await self._worker.call(
            lambda transaction: delivery.consume(transaction, rollout_ids, step, checkpoint_step),
            "write",
        )

    async def give_back(self, consumer: str, step: int) -> int:
        return await self._worker.call(
            lambda transaction: delivery.give_back(transaction, consumer, step), "write"
        )

    async def cancel(self, rollout_ids: Sequence[str], reason: str) -> int:
        return await self._worker.call(
            lambda transaction: ending.cancel(transaction, rollout_ids, reason), "write"
        )

    async def cancel_all(self, consumer: str, reason: str) -> int:
        return await self._worker.call(
            lambda transaction: ending.cancel_all(transaction, consumer, reason), "write"
        )

    async def revive(self, rollout_ids: Sequence[str]) -> int:
        return await self._worker.call(
            lambda transaction: ending.revive(transaction, rollout_ids), "write"
        )

    async def get(self, rollout_id: str, with_payload: bool = False) -> Entry | None:
        return await self._worker.call(
            lambda transaction: reading.get(transaction, rollout_id, with_payload), "read"
        )

    async def find(
        self,
        state: RolloutState | None = None,
        consumer: str | None = None,
        limit: int = 100,
        before: str | None = None,
    ) -> list[Entry]:
        return await self._worker.call(
            lambda transaction: reading.find(transaction, state, consumer, limit, before), "read"
        )

    async def events(self, rollout_id: str) -> list[Event]:
        return await self._worker.call(
            lambda transaction: reading.events(transaction, rollout_id), "read"
        )

    async def counts(self, consumer: str | None = None) -> LedgerCounts:
        return await self._worker.call(
            lambda transaction: counts_of(transaction.trajectories(consumer or ALL)), "read"
        )

    async def audit(self) -> LedgerAudit:
        if self._path == ":memory:":
            return await self._worker.call(
                lambda transaction: reading.audit(transaction.db), "read"
            )
        await self.revision()  # refuses a ledger that is not open
        return await asyncio.to_thread(self._audit_file)

    def _audit_file(self) -> LedgerAudit:
        # Beside the worker: a long ledger takes long to replay, and nothing waits for that.
        try:
            with closing(sqlite3.connect(self._path, isolation_level=None, timeout=BUSY_S)) as db:
                db.execute("BEGIN")
                return reading.audit(db)
        except sqlite3.Error as error:
            raise StateError(f"ledger {self._path}: {error}") from error

    async def compact(self, older_than_s: float) -> int:
        forgotten = 0
        forget: Callable[[Transaction], int] = partial(ending.forget, older_than_s=older_than_s)
        while groups := await self._worker.call(forget, "write"):
            forgotten += groups
        return forgotten

    async def get_note(self, key: str) -> str | None:
        return await self._worker.call(
            lambda transaction: reading.get_note(transaction, key), "read"
        )

    async def put_note(self, key: str, value: str) -> None:
        def put(transaction: Transaction) -> None:
            transaction.db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (key, value))
            transaction.touch()

        await self._worker.call(put, "note")

    async def swap_note(self, key: str, old: str | None, new: str) -> bool:
        def swap(transaction: Transaction) -> bool:
            if reading.get_note(transaction, key) != old:
                return False
            transaction.db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (key, new))
            transaction.touch()
            return True

        return await self._worker.call(swap, "note")

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.stop)
