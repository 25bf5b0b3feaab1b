"""The ledger on one SQLite file (WAL): survives kill -9 of its process without losing a transition.

One worker thread holds the connection and commits all waiting calls together, so the event loop never
blocks. Other processes may open the same file: a command beside a running gateway, for example.
A power cut may lose the last moments (synchronous=NORMAL) but no note, never the file's integrity.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing

from gateway.ledger.on_sqlite import (
    compaction,
    delivery_queue,
    key_value_store,
    reader,
    rollout_queue,
    work_queue,
)
from gateway.ledger.on_sqlite.methods import WithWorker, read, write, write_through
from gateway.ledger.on_sqlite.worker import BUSY_S, SqliteThread
from gateway.ledger.records import Lease
from headway.contracts.codec import encode_groups
from headway.contracts.errors import StateError
from headway.contracts.http.ledger import LedgerAudit
from headway.contracts.types import TrajectoryGroup
from headway.runtime.offload import offload


class SqliteLedger(WithWorker):
    """`Ledger` on SQLite; `:memory:` keeps nothing beyond the process."""

    is_shared = False

    def __init__(self, path: str, now: Callable[[], float] = time.time) -> None:
        """Args:
        path: of the file, or `:memory:`.
        now: the clock of leases, timeouts and logs, in seconds since the epoch.
        """
        super().__init__(SqliteThread(path, now))
        self._path = path

    async def connect(self) -> None:
        await self._worker.start()

    async def open(self, owner: str, lease_s: float) -> None:
        self._worker.owner, self._worker.lease_s = owner, lease_s
        await self.connect()
        await self._worker.call(work_queue.requeue_leased, "write", "the gateway restarted")

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.stop)

    submit = write(rollout_queue.submit)
    cancel = write(rollout_queue.cancel)
    cancel_all = write(rollout_queue.cancel_all)
    revive = write(rollout_queue.revive)

    async def compact(self, older_than_s: float) -> int:
        forgotten = 0
        while groups := await self._worker.call(compaction.forget, "write", older_than_s):
            forgotten += groups
        return forgotten

    lease = write(work_queue.lease)
    renew = write(work_queue.renew)
    expire = write(work_queue.expire)
    drop_filtered = write(work_queue.drop_filtered)
    fail = write(work_queue.fail)
    requeue = write(work_queue.requeue)

    async def complete(self, lease: Lease, group: TrajectoryGroup) -> None:
        size = sum(row.num_tokens for row in group.trajectories)
        payload = await offload(size, encode_groups, [group])
        result = (group.oldest_version, group.mean_reward, payload)
        await self._worker.call(work_queue.complete, "write", lease, *result)

    deliver = write(delivery_queue.deliver)
    deliver_exactly = write(delivery_queue.deliver_exactly)
    outstanding = read(delivery_queue.outstanding)
    consume = write(delivery_queue.consume)
    give_back = write(delivery_queue.give_back)

    revision = read(reader.revision)
    get = read(reader.get)
    find = read(reader.find)
    events = read(reader.events)
    counts = read(reader.counts)

    async def audit(self) -> LedgerAudit:
        if self._path == ":memory:":
            return await self._worker.call(lambda transaction: reader.audit(transaction.db), "read")
        await self.revision()  # refuses a ledger that is not open
        return await asyncio.to_thread(self._audit_file)

    def _audit_file(self) -> LedgerAudit:
        # Beside the worker: a long ledger takes long to replay, and nothing waits for that.
        try:
            with closing(sqlite3.connect(self._path, isolation_level=None, timeout=BUSY_S)) as db:
                db.execute("BEGIN")
                return reader.audit(db)
        except sqlite3.Error as error:
            raise StateError(f"ledger {self._path}: {error}") from error

    get_value = read(key_value_store.get_value)
    set_value = write_through(key_value_store.set_value)
    compare_and_set = write_through(key_value_store.compare_and_set)
