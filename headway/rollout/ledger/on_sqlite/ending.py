"""Ends before their time, second lives, and forgetting, on SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.contracts.http.rollouts import RolloutState
from headway.rollout.ledger.base import OPEN_STATES
from headway.rollout.ledger.on_sqlite.schema import ENDED as ENDED_TERM
from headway.rollout.ledger.on_sqlite.transaction import GROW, Transaction
from headway.rollout.ledger.proof import Proof
from headway.rollout.ledger.transitions import ENDED

COLUMNS = "seq, consumer, size, state, num_events"
CHUNK = 500
"""Rollouts that are forgotten in one transaction."""


def cancel(transaction: Transaction, rollout_ids: Sequence[str], reason: str) -> int:
    """End these rollouts; returns the groups."""
    found = (
        transaction.db.execute(f"SELECT {COLUMNS} FROM rollouts WHERE id = ?", (name,)).fetchone()
        for name in dict.fromkeys(rollout_ids)
    )
    rows = [row for row in found if row is not None and row[3] in OPEN_STATES]
    _end(transaction, rows, reason)
    return len(rows)


def cancel_all(transaction: Transaction, consumer: str, reason: str) -> int:
    """End what a consumer has not consumed; returns the trajectories."""
    rows = [
        row
        for state in OPEN_STATES
        for row in transaction.db.execute(
            f"SELECT {COLUMNS} FROM rollouts WHERE consumer = ? AND state = '{state}'", (consumer,)
        ).fetchall()
    ]
    _end(transaction, rows, reason)
    return sum(row[2] for row in rows)


def _end(transaction: Transaction, rows: Sequence[tuple[Any, ...]], reason: str) -> None:
    for seq, consumer, size, state, number in rows:
        transaction.db.execute(
            "UPDATE rollouts SET state = 'cancelled', reason = ?, has_payload = 0, "
            "num_events = num_events + 1, changed_at = ? WHERE seq = ?",
            (reason, transaction.now, seq),
        )
        transaction.db.execute("DELETE FROM payloads WHERE seq = ?", (seq,))
        transaction.log(seq, number + 1, "cancel", reason)
        transaction.shift(consumer, size, state, "cancelled")


def revive(transaction: Transaction, rollout_ids: Sequence[str]) -> int:
    """Queue failed rollouts once more; returns the groups."""
    revived = 0
    for rollout_id in dict.fromkeys(rollout_ids):
        row = transaction.db.execute(
            "UPDATE rollouts SET state = 'queued', attempt = 0, num_events = num_events + 1, "
            "since = ?1, deadline = ?1 + timeout_s, changed_at = ?1 "
            "WHERE id = ?2 AND state = 'failed' RETURNING seq, consumer, size, num_events",
            (transaction.now, rollout_id),
        ).fetchone()
        if row is not None:
            seq, consumer, size, number = row
            transaction.log(seq, number, "revive")
            transaction.shift(consumer, size, "failed", "queued")
            revived += 1
    return revived


def forget(transaction: Transaction, older_than_s: float) -> int:
    """Forget up to `CHUNK` rollouts that ended so long ago, but for what the audit needs of them.

    A consumed one whose payload is kept may be given back still: it stays.
    """
    transaction.flush()
    before = transaction.now - older_than_s
    rows: list[tuple[int, RolloutState, int, int | None]] = []
    for state in ENDED:
        rows += transaction.db.execute(
            "SELECT seq, state, size, staleness FROM rollouts "
            f"WHERE {ENDED_TERM} AND state = '{state}' AND changed_at <= ? "
            "AND NOT (state = 'consumed' AND has_payload) ORDER BY changed_at LIMIT ?",
            (before, CHUNK - len(rows)),
        ).fetchall()
    proof = Proof()
    for seq, state, size, staleness in rows:
        events = transaction.db.execute(
            "SELECT event FROM events WHERE rollout = ? ORDER BY number", (seq,)
        )
        proof.add(state, size, staleness, [event for (event,) in events])
    seqs = [row[:1] for row in rows]
    for table, column in (("events", "rollout"), ("payloads", "seq"), ("rollouts", "seq")):
        transaction.db.executemany(f"DELETE FROM {table} WHERE {column} = ?", seqs)
    _remember(transaction, proof)
    if rows:
        transaction.touch()
    return len(rows)


def _remember(transaction: Transaction, proof: Proof) -> None:
    transaction.db.executemany(
        "INSERT INTO forgotten VALUES (?, ?) ON CONFLICT (state) DO UPDATE "
        "SET trajectories = trajectories + excluded.trajectories",
        list(proof.trajectories.items()),
    )
    findings = proof.findings
    for name in ("lost", "duplicated", "requeues"):
        transaction.db.execute(GROW, (name, getattr(findings, name)))
    transaction.db.execute(
        "INSERT INTO numbers VALUES ('max_staleness', ?) ON CONFLICT (name) DO UPDATE "
        "SET value = max(value, excluded.value)",
        (findings.max_staleness,),
    )
