"""Forgetting rollouts that ended long ago, on SQLite."""

from __future__ import annotations

from gateway.ledger.auditor import LedgerAuditor
from gateway.ledger.on_sqlite.schema import ENDED as ENDED_TERM
from gateway.ledger.on_sqlite.transaction import GROW, Transaction
from gateway.ledger.transitions import ENDED
from headway.contracts.http.rollouts import RolloutState

CHUNK = 500
"""Rollouts that are forgotten in one transaction."""


def forget(transaction: Transaction, older_than_s: float) -> int:
    """Forget up to `CHUNK` rollouts that ended so long ago, except for what the audit needs of them.

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
    proof = LedgerAuditor()
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


def _remember(transaction: Transaction, proof: LedgerAuditor) -> None:
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
