"""`LedgerReader` on SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from gateway.ledger.auditor import AuditFindings, LedgerAuditor
from gateway.ledger.on_sqlite.schema import ENDED
from gateway.ledger.on_sqlite.transaction import ALL, REVISION, Transaction
from gateway.ledger.records import Entry, Event
from gateway.ledger.refusals import no_such_page
from gateway.ledger.transitions import counts_of
from headway.contracts.http.ledger import LedgerAudit, LedgerCounts
from headway.contracts.http.rollouts import RolloutState
from headway.contracts.types import RolloutRequest

COLUMNS = (
    "request, state, attempt, submitted_at, changed_at, oldest_version, staleness, reason, step, "
    "mean_reward"
)
INDEX_OF: dict[RolloutState, str] = {
    "queued": "queued",
    "leased": "leased",
    "ready": "ready",
    "delivered": "delivered",
    "failed": "ended",
    "filtered": "ended",
    "stale": "ended",
    "cancelled": "ended",
}
"""States that are few beside the consumed ones: their own index finds them sooner than the order."""


def revision(transaction: Transaction) -> int:
    """Changes so far."""
    row = transaction.db.execute("SELECT value FROM numbers WHERE name = ?", (REVISION,)).fetchone()
    return 0 if row is None else int(row[0])


def get(transaction: Transaction, rollout_id: str, with_payload: bool = False) -> Entry | None:
    """One rollout."""
    payload = "payload" if with_payload else "NULL"
    row = transaction.db.execute(
        f"SELECT {COLUMNS}, {payload} FROM rollouts LEFT JOIN payloads USING (seq) WHERE id = ?",
        (rollout_id,),
    ).fetchone()
    return None if row is None else _entry(*row)


def find(
    transaction: Transaction,
    state: RolloutState | None = None,
    consumer: str | None = None,
    limit: int = 100,
    before: str | None = None,
) -> list[Entry]:
    """A page, newest first."""
    terms, values = ["1"], []
    if state is not None:
        terms.append(f"state = '{state}'")  # spelled out, so that the partial indexes serve
    if consumer is not None:
        terms.append("consumer = ?")
        values.append(consumer)
    if before is not None:
        terms.append("seq < ?")
        values.append(_seq_of(transaction, before))
    source = "rollouts"
    if state is not None and state in INDEX_OF:
        source += f" INDEXED BY {INDEX_OF[state]}"
        if INDEX_OF[state] == "ended":
            terms.append(ENDED)
    rows = transaction.db.execute(
        f"SELECT {COLUMNS} FROM {source} WHERE {' AND '.join(terms)} ORDER BY seq DESC LIMIT ?",
        (*values, limit),
    )
    return [_entry(*row) for row in rows]


def _seq_of(transaction: Transaction, rollout_id: str) -> Any:
    row = transaction.db.execute("SELECT seq FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
    if row is None:
        raise no_such_page(rollout_id)
    return row[0]


def _entry(request: str, *fields: Any) -> Entry:
    return Entry(RolloutRequest.model_validate_json(request), *fields)


def events(transaction: Transaction, rollout_id: str) -> list[Event]:
    """The log of one rollout."""
    rows = transaction.db.execute(
        "SELECT event, detail, at FROM events WHERE rollout = "
        "(SELECT seq FROM rollouts WHERE id = ?) ORDER BY number",
        (rollout_id,),
    )
    return [Event(*row) for row in rows]


def counts(transaction: Transaction, consumer: str | None = None) -> LedgerCounts:
    """Trajectories by state."""
    return counts_of(transaction.trajectories(consumer or ALL))


def audit(db: sqlite3.Connection) -> LedgerAudit:
    """Replay all logs; within one transaction, so that the tables are of one moment."""
    proof = LedgerAuditor()
    for state, size, staleness, log in _logs(db):
        proof.add(state, size, staleness, log)
    for state, trajectories in db.execute("SELECT state, trajectories FROM forgotten"):
        proof.trajectories[state] += trajectories
    tallies = db.execute("SELECT state, trajectories FROM tallies WHERE consumer = ?", (ALL,))
    proof.compare(dict(tallies))
    numbers = dict(db.execute("SELECT name, value FROM numbers WHERE name != ?", (REVISION,)))
    proof.findings.add(AuditFindings(**numbers))
    return proof.audit()


def _logs(db: sqlite3.Connection) -> Iterator[tuple[str | None, int, int | None, list[str]]]:
    """State, size, staleness and events of every rollout, also of those whose row is gone."""
    rows = db.execute(
        "SELECT seq, state, size, staleness, event FROM rollouts "
        "LEFT JOIN events ON rollout = seq ORDER BY seq, number"
    )
    for (_, state, size, staleness), log in groupby(rows, itemgetter(0, 1, 2, 3)):
        yield state, size, staleness, [row[4] for row in log if row[4] is not None]
    orphans = db.execute(
        "SELECT rollout, event FROM events WHERE rollout NOT IN (SELECT seq FROM rollouts) "
        "ORDER BY rollout, number"
    )
    for _, log in groupby(orphans, itemgetter(0)):
        yield None, 1, None, [event for _, event in log]
