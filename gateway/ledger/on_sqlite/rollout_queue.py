"""`RolloutQueue` on SQLite, except `compact`: submission, cancellation, requeuing."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.ledger.on_sqlite.transaction import ROW, RolloutRow, Transaction
from gateway.ledger.records import OPEN_STATES
from gateway.ledger.refusals import other_content, queue_full
from headway.contracts.types import RolloutRequest

INSERT = (
    "INSERT INTO rollouts (id, consumer, request, size, priority, min_version, state, num_events, "
    "submitted_at, since, timeout_s, deadline, changed_at) "
    "VALUES (?1, ?2, ?3, ?4, ?5, ?6, 'queued', 1, ?7, ?7, ?8, ?7 + ?8, ?7) "
    "ON CONFLICT (id) DO NOTHING RETURNING seq"
)


def submit(
    transaction: Transaction,
    requests: Sequence[RolloutRequest],
    max_queued: int,
    max_queued_per_consumer: int | None = None,
) -> list[bool]:
    """Queue requests; per request whether it was new."""
    new = [_insert(transaction, request) for request in requests]
    if any(new):
        _check_room(transaction, requests, max_queued, max_queued_per_consumer)
    return new


def _insert(transaction: Transaction, request: RolloutRequest) -> bool:
    text, size = request.model_dump_json(), request.prompt.group_size
    row = transaction.db.execute(
        INSERT,
        (
            request.rollout_id,
            request.consumer,
            text,
            size,
            request.priority,
            request.versions.min_version or 0,
            transaction.now,
            request.timeout_s,
        ),
    ).fetchone()
    if row is None:
        _check_same(transaction, request, text)
        return False
    transaction.log(row[0], 1, "submit")
    transaction.shift(request.consumer, size, None, "queued")
    return True


def _check_same(transaction: Transaction, request: RolloutRequest, text: str) -> None:
    (known,) = transaction.db.execute(
        "SELECT request FROM rollouts WHERE id = ?", (request.rollout_id,)
    ).fetchone()
    # Parsed, since an older release may have written it with fewer fields.
    if known != text and RolloutRequest.model_validate_json(known) != request:
        raise other_content(request.rollout_id)


def _check_room(
    transaction: Transaction,
    requests: Sequence[RolloutRequest],
    max_queued: int,
    max_queued_per_consumer: int | None,
) -> None:
    _, queued = transaction.tally("queued")
    if queued > max_queued:
        raise queue_full(queued, max_queued)
    if max_queued_per_consumer is None:
        return
    for consumer in {request.consumer for request in requests}:
        _, queued = transaction.tally("queued", consumer)
        if queued > max_queued_per_consumer:
            raise queue_full(queued, max_queued_per_consumer, consumer)


def cancel(transaction: Transaction, rollout_ids: Sequence[str], reason: str) -> int:
    """End these rollouts; returns the groups."""
    found = (
        transaction.db.execute(f"SELECT {ROW} FROM rollouts WHERE id = ?", (name,)).fetchone()
        for name in dict.fromkeys(rollout_ids)
    )
    rows = [RolloutRow(*row) for row in found if row is not None]
    rows = [row for row in rows if row.state in OPEN_STATES]
    _end(transaction, rows, reason)
    return len(rows)


def cancel_all(transaction: Transaction, consumer: str, reason: str) -> int:
    """End what a consumer has not consumed; returns the trajectories."""
    rows = [
        RolloutRow(*row)
        for state in OPEN_STATES
        for row in transaction.db.execute(
            f"SELECT {ROW} FROM rollouts WHERE consumer = ? AND state = '{state}'", (consumer,)
        ).fetchall()
    ]
    _end(transaction, rows, reason)
    return sum(row.size for row in rows)


def _end(transaction: Transaction, rows: Sequence[RolloutRow], reason: str) -> None:
    for row in rows:
        transaction.db.execute("DELETE FROM payloads WHERE seq = ?", (row.seq,))
        transaction.move(row, "cancel", reason)


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
