"""The ledger on one SQLite file (WAL): survives kill -9 of its process without losing a transition.

All statements run on one worker thread, so transitions are serial and the event loop never blocks.
A power cut may lose the last moments (synchronous=NORMAL) but no note, never the file's integrity.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from headway.contracts.codec import encode_groups
from headway.contracts.errors import Conflict, NotFound, QueueFull, StateError, WorkflowError
from headway.contracts.http import LedgerAudit, LedgerCounts
from headway.contracts.types import PolicyVersion, RolloutRequest, TrajectoryGroup
from headway.rollout.ledger.base import Delivery, Lease, LeaseLimits

SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    consumer TEXT NOT NULL,
    digest TEXT NOT NULL,
    request TEXT NOT NULL,
    size INTEGER NOT NULL,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    oldest_version INTEGER,
    staleness INTEGER,
    payload BLOB,
    reason TEXT,
    delivery_id TEXT,
    step INTEGER
);
CREATE INDEX IF NOT EXISTS rollouts_by_state ON rollouts (state, consumer, seq);
CREATE INDEX IF NOT EXISTS rollouts_by_delivery ON rollouts (delivery_id);
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL,
    event TEXT NOT NULL,
    detail TEXT,
    at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS notes (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""

NEXT_STATE: dict[str, tuple[set[str | None], str]] = {
    "submit": ({None}, "queued"),
    "lease": ({"queued"}, "leased"),
    "requeue": ({"leased"}, "queued"),
    "complete": ({"leased"}, "ready"),
    "fail": ({"leased"}, "failed"),
    "deliver": ({"ready"}, "delivered"),
    "drop": ({"ready"}, "stale"),
    "consume": ({"delivered"}, "consumed"),
    "give_back": ({"delivered", "consumed"}, "ready"),
    "replay": ({"consumed"}, "queued"),
    "cancel": ({"queued", "ready", "delivered"}, "cancelled"),
}
"""Event -> (states it may leave, state it enters)."""

P = ParamSpec("P")
R = TypeVar("R")


class SqliteLedger:
    """`Ledger` on SQLite; `:memory:` keeps nothing beyond the process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._database: sqlite3.Connection | None = None

    async def open(self) -> None:
        await self._run(SqliteLedger._open)

    async def submit(self, requests: Sequence[RolloutRequest], max_queued: int) -> list[bool]:
        return await self._run(SqliteLedger._submit, requests, max_queued)

    async def lease(self, limits: LeaseLimits, version: PolicyVersion) -> Lease | None:
        return await self._run(SqliteLedger._lease, limits, version)

    async def complete(self, group: TrajectoryGroup) -> None:
        payload = encode_groups([group])
        await self._run(SqliteLedger._complete, group.rollout_id, group.oldest_version, payload)

    async def fail(self, rollout_id: str, reason: str) -> None:
        await self._run(SqliteLedger._end_attempt, rollout_id, "fail", reason)

    async def requeue(self, rollout_id: str, reason: str) -> None:
        await self._run(SqliteLedger._end_attempt, rollout_id, "requeue", reason)

    async def deliver(
        self,
        delivery_id: str,
        count: int,
        consumer: str,
        rollout_ids: Sequence[str] | None,
        version: PolicyVersion,
        max_staleness: int | None,
    ) -> Delivery:
        if rollout_ids is not None:
            return await self._run(SqliteLedger._deliver_exactly, delivery_id, rollout_ids, version)
        return await self._run(
            SqliteLedger._deliver_oldest, delivery_id, count, consumer, version, max_staleness
        )

    async def outstanding(self, consumer: str) -> int:
        return await self._run(SqliteLedger._outstanding, consumer)

    async def consume(self, rollout_ids: Sequence[str], step: int, checkpoint_step: int) -> None:
        await self._run(SqliteLedger._consume, rollout_ids, step, checkpoint_step)

    async def give_back(self, consumer: str, step: int) -> int:
        return await self._run(SqliteLedger._give_back, consumer, step)

    async def cancel(self, consumer: str) -> int:
        return await self._run(SqliteLedger._cancel, consumer)

    async def counts(self, consumer: str | None = None) -> LedgerCounts:
        return await self._run(SqliteLedger._counts, consumer)

    async def audit(self) -> LedgerAudit:
        return await self._run(SqliteLedger._audit)

    async def get_note(self, key: str) -> str | None:
        return await self._run(SqliteLedger._get_note, key)

    async def put_note(self, key: str, value: str) -> None:
        await self._run(SqliteLedger._put_note, key, value)

    async def close(self) -> None:
        if self._database is not None:
            await self._run(SqliteLedger._close)
        self._thread.shutdown(wait=True)

    async def _run(
        self, work: Callable[Concatenate[SqliteLedger, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: work(self, *args, **kwargs)
            )
        except sqlite3.Error as error:
            raise StateError(
                f"ledger {self._path}: {error}; check free space and permissions"
            ) from error

    # Everything below runs on the worker thread.

    @property
    def _db(self) -> sqlite3.Connection:
        if self._database is None:
            raise StateError(f"ledger {self._path} is not open")
        return self._database

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")

    def _open(self) -> None:
        if self._path != ":memory:":
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(self._path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("PRAGMA busy_timeout=5000")
        self._db.executescript(SCHEMA)
        with self._transaction() as db:
            leased = [
                row[0] for row in db.execute("SELECT id FROM rollouts WHERE state = 'leased'")
            ]
            for rollout_id in leased:
                self._move(rollout_id, "requeue", "the gateway restarted")

    def _close(self) -> None:
        self._db.close()
        self._database = None

    def _move(self, rollout_id: str, event: str, detail: str | None = None) -> None:
        """One transition with its event; the caller holds the transaction."""
        sources, target = NEXT_STATE[event]
        marks = ",".join("?" * len(sources))
        moved = self._db.execute(
            f"UPDATE rollouts SET state = ? WHERE id = ? AND state IN ({marks})",
            (target, rollout_id, *sources),
        )
        if moved.rowcount != 1:
            row = self._db.execute(
                "SELECT state FROM rollouts WHERE id = ?", (rollout_id,)
            ).fetchone()
            if row is None:
                raise NotFound(f"no rollout {rollout_id!r} in the ledger")
            raise Conflict(
                f"rollout {rollout_id!r} is {row[0]}; {event} needs {sorted(map(str, sources))}"
            )
        self._log(rollout_id, event, detail)

    def _log(self, rollout_id: str, event: str, detail: str | None) -> None:
        self._db.execute(
            "INSERT INTO events (id, event, detail, at) VALUES (?, ?, ?, ?)",
            (rollout_id, event, detail, time.time()),
        )

    def _submit(self, requests: Sequence[RolloutRequest], max_queued: int) -> list[bool]:
        new: list[bool] = []
        with self._transaction() as db:
            for request in requests:
                text = request.model_dump_json()
                digest = hashlib.sha256(text.encode()).hexdigest()
                known = db.execute(
                    "SELECT digest FROM rollouts WHERE id = ?", (request.rollout_id,)
                ).fetchone()
                if known is not None and known[0] != digest:
                    raise Conflict(
                        f"rollout {request.rollout_id!r} was submitted before with other content; "
                        "use a new id"
                    )
                if known is None:
                    db.execute(
                        "INSERT INTO rollouts (id, consumer, digest, request, size, state) "
                        "VALUES (?, ?, ?, ?, ?, 'queued')",
                        (
                            request.rollout_id,
                            request.consumer,
                            digest,
                            text,
                            request.prompt.group_size,
                        ),
                    )
                    self._log(request.rollout_id, "submit", None)
                new.append(known is None)
            (queued,) = db.execute(
                "SELECT coalesce(sum(size), 0) FROM rollouts WHERE state = 'queued'"
            ).fetchone()
            if any(new) and queued > max_queued:
                raise QueueFull(
                    f"{queued} trajectories would wait, executor.max_queued={max_queued}; submit later"
                )
        return new

    def _lease(self, limits: LeaseLimits, version: PolicyVersion) -> Lease | None:
        with self._transaction() as db:
            heads = [
                db.execute(
                    "SELECT seq, size, id, request, attempt FROM rollouts "
                    f"WHERE state = 'queued' AND consumer {comparison} ? ORDER BY seq LIMIT 1",
                    (limits.consumer or "",),
                ).fetchone()
                for comparison in ("=", "!=")
            ]
            room = (limits.bounded, limits.free)
            fitting = [
                head for head, size in zip(heads, room, strict=True) if head and head[1] <= size
            ]
            if not fitting:
                return None
            _, _, rollout_id, text, attempt = min(fitting)
            db.execute("UPDATE rollouts SET attempt = ? WHERE id = ?", (attempt + 1, rollout_id))
            self._move(rollout_id, "lease", f"attempt={attempt + 1} version={version}")
        return Lease(RolloutRequest.model_validate_json(text), attempt + 1)

    def _complete(self, rollout_id: str, oldest_version: PolicyVersion, payload: bytes) -> None:
        with self._transaction() as db:
            self._move(rollout_id, "complete", f"oldest_version={oldest_version}")
            db.execute(
                "UPDATE rollouts SET payload = ?, oldest_version = ? WHERE id = ?",
                (payload, oldest_version, rollout_id),
            )

    def _end_attempt(self, rollout_id: str, event: str, reason: str) -> None:
        with self._transaction() as db:
            self._move(rollout_id, event, reason)
            db.execute("UPDATE rollouts SET reason = ? WHERE id = ?", (reason, rollout_id))

    def _delivered_before(self, delivery_id: str) -> tuple[bytes, ...] | None:
        rows = self._db.execute(
            "SELECT payload FROM rollouts WHERE delivery_id = ? AND state IN ('delivered', 'consumed') "
            "AND payload IS NOT NULL ORDER BY seq",
            (delivery_id,),
        ).fetchall()
        return tuple(row[0] for row in rows) or None

    def _deliver_oldest(
        self,
        delivery_id: str,
        count: int,
        consumer: str,
        version: PolicyVersion,
        max_staleness: int | None,
    ) -> Delivery:
        with self._transaction() as db:
            before = self._delivered_before(delivery_id)
            if before is not None:
                return Delivery(before, 0, 0)
            dropped = 0
            if max_staleness is not None:
                too_old = db.execute(
                    "SELECT id, size, oldest_version FROM rollouts "
                    "WHERE state = 'ready' AND consumer = ? AND oldest_version < ?",
                    (consumer, version - max_staleness),
                ).fetchall()
                for rollout_id, size, oldest in too_old:
                    self._move(rollout_id, "drop", f"version={version} oldest_version={oldest}")
                    dropped += size
            rows = db.execute(
                "SELECT id, oldest_version, payload FROM rollouts "
                "WHERE state = 'ready' AND consumer = ? ORDER BY seq LIMIT ?",
                (consumer, count),
            ).fetchall()
            if len(rows) < count:
                return Delivery(None, len(rows), dropped)
            self._give_out(delivery_id, [(row[0], row[1]) for row in rows], version)
        return Delivery(tuple(row[2] for row in rows), len(rows), dropped)

    def _deliver_exactly(
        self, delivery_id: str, rollout_ids: Sequence[str], version: PolicyVersion
    ) -> Delivery:
        with self._transaction() as db:
            before = self._delivered_before(delivery_id)
            if before is not None:
                return Delivery(before, 0, 0)
            found = []
            for rollout_id in rollout_ids:
                row = db.execute(
                    "SELECT id, state, oldest_version, payload, reason FROM rollouts WHERE id = ?",
                    (rollout_id,),
                ).fetchone()
                if row is None:
                    raise NotFound(f"rollout {rollout_id!r} was never submitted")
                if row[1] in ("failed", "stale", "cancelled"):
                    raise WorkflowError(
                        f"rollout {rollout_id!r} is {row[1]}: {row[4] or 'no reason kept'}"
                    )
                if row[1] in ("delivered", "consumed"):
                    raise Conflict(f"rollout {rollout_id!r} was given out before")
                found.append(row)
            ready = [row for row in found if row[1] == "ready"]
            if len(ready) < len(found):
                return Delivery(None, len(ready), 0)
            self._give_out(delivery_id, [(row[0], row[2]) for row in ready], version)
        return Delivery(tuple(row[3] for row in ready), len(ready), 0)

    def _give_out(
        self, delivery_id: str, rows: Sequence[tuple[str, PolicyVersion]], version: PolicyVersion
    ) -> None:
        for rollout_id, oldest in rows:
            self._move(rollout_id, "deliver", f"version={version} oldest_version={oldest}")
            self._db.execute(
                "UPDATE rollouts SET delivery_id = ?, staleness = ? WHERE id = ?",
                (delivery_id, version - oldest, rollout_id),
            )

    def _outstanding(self, consumer: str) -> int:
        (groups,) = self._db.execute(
            "SELECT count(*) FROM rollouts "
            "WHERE consumer = ? AND state IN ('queued', 'leased', 'ready')",
            (consumer,),
        ).fetchone()
        return int(groups)

    def _consume(self, rollout_ids: Sequence[str], step: int, checkpoint_step: int) -> None:
        with self._transaction() as db:
            for rollout_id in rollout_ids:
                row = db.execute(
                    "SELECT state, step FROM rollouts WHERE id = ?", (rollout_id,)
                ).fetchone()
                if row == ("consumed", step):
                    continue
                self._move(rollout_id, "consume", f"step={step}")
                db.execute("UPDATE rollouts SET step = ? WHERE id = ?", (step, rollout_id))
            db.execute(
                "UPDATE rollouts SET payload = NULL WHERE state = 'consumed' AND step <= ? "
                "AND payload IS NOT NULL",
                (checkpoint_step,),
            )

    def _give_back(self, consumer: str, step: int) -> int:
        with self._transaction() as db:
            rows = db.execute(
                "SELECT id, payload IS NULL FROM rollouts WHERE consumer = ? "
                "AND (state = 'delivered' OR (state = 'consumed' AND step > ?))",
                (consumer, step),
            ).fetchall()
            for rollout_id, is_forgotten in rows:
                event = "replay" if is_forgotten else "give_back"
                self._move(rollout_id, event, f"checkpoint_step={step}")
                db.execute(
                    "UPDATE rollouts SET delivery_id = NULL, step = NULL, staleness = NULL, attempt = 0 "
                    "WHERE id = ?",
                    (rollout_id,),
                )
        return len(rows)

    def _cancel(self, consumer: str) -> int:
        with self._transaction() as db:
            rows = db.execute(
                "SELECT id, size FROM rollouts "
                "WHERE consumer = ? AND state IN ('queued', 'ready', 'delivered')",
                (consumer,),
            ).fetchall()
            for rollout_id, _ in rows:
                self._move(rollout_id, "cancel", "the consumer detached")
            db.execute(
                "UPDATE rollouts SET payload = NULL WHERE state = 'cancelled' AND payload IS NOT NULL"
            )
        return sum(size for _, size in rows)

    def _counts(self, consumer: str | None) -> LedgerCounts:
        rows = self._db.execute(
            "SELECT state, sum(size) FROM rollouts WHERE ?1 IS NULL OR consumer = ?1 GROUP BY state",
            (consumer,),
        ).fetchall()
        return LedgerCounts(submitted=sum(size for _, size in rows), **dict(rows))

    def _audit(self) -> LedgerAudit:
        states: dict[str, str | None] = {}
        lost = duplicated = requeues = 0
        sizes = dict(self._db.execute("SELECT id, size FROM rollouts"))
        for rollout_id, event in self._db.execute("SELECT id, event FROM events ORDER BY seq"):
            sources, target = NEXT_STATE.get(event, (set(), f"unknown event {event}"))
            requeues += sizes.get(rollout_id, 1) * (event == "requeue")
            if states.get(rollout_id) not in sources:
                duplicated += sizes.get(rollout_id, 1) * (event in ("consume", "submit"))
                lost += sizes.get(rollout_id, 1) * (event not in ("consume", "submit"))
            states[rollout_id] = target
        table = dict(self._db.execute("SELECT id, state FROM rollouts"))
        for rollout_id in states.keys() | table.keys():
            if states.get(rollout_id) != table.get(rollout_id):
                lost += sizes.get(rollout_id, 1)
        (staleness,) = self._db.execute(
            "SELECT coalesce(max(staleness), 0) FROM rollouts WHERE state = 'consumed'"
        ).fetchone()
        return LedgerAudit(
            counts=self._counts(None),
            lost=lost,
            duplicated=duplicated,
            max_staleness=staleness,
            requeues=requeues,
        )

    def _get_note(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def _put_note(self, key: str, value: str) -> None:
        # What a note says was told to others next: it is on the medium before that.
        self._db.execute("PRAGMA synchronous=FULL")
        try:
            self._db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (key, value))
        finally:
            self._db.execute("PRAGMA synchronous=NORMAL")
