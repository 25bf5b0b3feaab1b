"""`WorkQueue` on SQLite: from the lease of a rollout to the end of that attempt."""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Sequence

from gateway.ledger.on_sqlite.schema import PENDING
from gateway.ledger.on_sqlite.transaction import ROW, RolloutRow, Transaction
from gateway.ledger.records import Capacity, Lease
from gateway.ledger.transitions import NEXT_STATE, EventName, fenced
from headway.contracts.http.rollouts import RolloutState
from headway.contracts.types import PolicyVersion, RolloutRequest

BOUNDED_STATES: tuple[RolloutState, ...] = ("leased", "ready", "delivered", "consumed")
"""States that count against `Capacity.budget`."""


def lease(transaction: Transaction, admission: Capacity) -> list[Lease]:
    """Take the heads of both lines while they fit."""
    free, budget = admission.free, _budget(transaction, admission)
    if free < 1 or transaction.tally("queued") == (0, 0):
        return []
    transaction.flush_tallies("queued")
    others = transaction.db.execute(
        "SELECT consumer FROM tallies WHERE state = 'queued' AND num_groups > 0 AND consumer NOT IN "
        "('', ?)",
        (admission.consumer or "",),
    ).fetchall()
    # Both are read before anything moves: they are lists, not cursors.
    lines = [_line(transaction, [name for (name,) in others], admission)]
    if admission.consumer is not None:
        lines.append(_line(transaction, [admission.consumer], admission))
    positions = [0 for _ in lines]
    taken: list[int] = []
    while True:
        heads = []
        for number, (line, position) in enumerate(zip(lines, positions, strict=True)):
            room = min(free, budget) if number else free
            if position < len(line) and line[position][2] <= room:
                heads.append((*line[position], number))
        if not heads:
            return _take(transaction, taken, admission.version)
        _, seq, size, number = min(heads)
        positions[number] += 1
        free -= size
        budget -= size * number
        taken.append(seq)


def _budget(transaction: Transaction, admission: Capacity) -> int:
    """Trajectories of the attached consumer that may start."""
    if admission.consumer is None or admission.budget is None:
        return admission.free
    held = transaction.trajectories(admission.consumer)
    return admission.budget - sum(held[state] for state in BOUNDED_STATES)


def _line(
    transaction: Transaction, consumers: Sequence[str], admission: Capacity
) -> list[tuple[int, int, int]]:
    """Heads of a line, `(-priority, seq, size)`; no more than could fit."""
    most = max(0, admission.free)
    rows = [
        transaction.db.execute(
            "SELECT -priority, seq, size FROM rollouts WHERE state = 'queued' AND consumer = ? "
            "AND min_version <= ? ORDER BY priority DESC, seq LIMIT ?",
            (consumer, admission.version, most),
        ).fetchall()
        for consumer in consumers
    ]
    return list(heapq.merge(*rows))[:most]


def _take(transaction: Transaction, seqs: Sequence[int], version: PolicyVersion) -> list[Lease]:
    """Lease these rollouts, in this order."""
    moved = transaction.db.execute(
        "UPDATE rollouts SET state = 'leased', attempt = attempt + 1, fence = fence + 1, report = NULL, "
        "owner = ?, expires = ?, admitted = ?, num_events = num_events + 1, changed_at = ? "
        "WHERE seq IN (SELECT value FROM json_each(?)) "
        "RETURNING seq, consumer, size, request, attempt, fence, num_events, since",
        (
            transaction.owner,
            transaction.now + transaction.lease_s,
            version,
            transaction.now,
            json.dumps(seqs),
        ),
    ).fetchall()
    leases = {}
    for seq, consumer, size, text, attempt, fence, number, since in moved:
        detail = f"attempt={attempt} version={version} owner={transaction.owner}"
        transaction.log(seq, number, "lease", detail)
        transaction.shift(consumer, size, "queued", "leased")
        request = RolloutRequest.model_validate_json(text)
        leases[seq] = Lease(request, attempt, transaction.now - since, fence)
    return [leases[seq] for seq in seqs]


def renew(transaction: Transaction, keys: Collection[str]) -> set[str]:
    """Prolong leases; those that have ended."""
    lost = set()
    for key in keys:
        rollout_id, fence = key.rsplit("#", 1)
        renewed = transaction.db.execute(
            "UPDATE rollouts SET expires = ? WHERE id = ? AND fence = ? AND state = 'leased'",
            (transaction.now + transaction.lease_s, rollout_id, int(fence)),
        )
        if renewed.rowcount == 0:
            lost.add(key)
    return lost


def expire(transaction: Transaction) -> int:
    """Fail what ran out of time, requeue what was let go."""
    return _time_out(transaction) + requeue_leased(
        transaction, "its owner {} was silent", "AND expires <= ?", (transaction.now,)
    )


def _time_out(transaction: Transaction) -> int:
    rows = transaction.db.execute(
        f"SELECT {ROW}, timeout_s FROM rollouts WHERE {PENDING} AND deadline <= ?",
        (transaction.now,),
    ).fetchall()
    for *row, timeout_s in rows:
        moved = RolloutRow(*row)
        reason = f"its timeout_s={timeout_s:g} passed while it was {moved.state}"
        transaction.move(moved, "time_out", reason)
    return len(rows)


def requeue_leased(
    transaction: Transaction, reason: str, where: str = "", values: tuple[float, ...] = ()
) -> int:
    """Put leased rollouts back whose owners are gone; `{}` in the reason becomes the owner."""
    rows = transaction.db.execute(
        f"SELECT {ROW}, owner FROM rollouts WHERE state = 'leased' {where}", values
    ).fetchall()
    for *row, owner in rows:
        transaction.move(RolloutRow(*row), "requeue", reason.format(repr(owner)))
    return len(rows)


def complete(
    transaction: Transaction,
    lease: Lease,
    oldest_version: PolicyVersion,
    mean_reward: float,
    payload: bytes,
) -> None:
    """Store the result of an attempt."""
    detail = f"oldest_version={oldest_version}"
    seq = _report(
        transaction,
        lease,
        "complete",
        detail,
        "oldest_version = ?, mean_reward = ?, has_payload = 1",
        (oldest_version, mean_reward),
    )
    if seq is not None:
        transaction.db.execute("INSERT OR REPLACE INTO payloads VALUES (?, ?)", (seq, payload))


def drop_filtered(transaction: Transaction, lease: Lease, reason: str, mean_reward: float) -> None:
    """Record that the filter dropped the group."""
    _end(transaction, lease, "filter", reason, mean_reward)


def fail(transaction: Transaction, lease: Lease, reason: str) -> None:
    """Record a failure."""
    _end(transaction, lease, "fail", reason)


def requeue(transaction: Transaction, lease: Lease, reason: str) -> None:
    """Put the rollout back."""
    _end(transaction, lease, "requeue", reason)


def _end(
    transaction: Transaction,
    lease: Lease,
    event: EventName,
    reason: str,
    mean_reward: float | None = None,
) -> None:
    _report(transaction, lease, event, reason, "reason = ?, mean_reward = ?", (reason, mean_reward))


def _report(
    transaction: Transaction,
    lease: Lease,
    event: EventName,
    detail: str,
    changes: str,
    values: tuple[object, ...],
) -> int | None:
    """One transition out of `leased` by who holds the lease; None if it was reported before."""
    _, target = NEXT_STATE[event]
    moved = transaction.db.execute(
        "UPDATE rollouts SET state = ?, report = ?, num_events = num_events + 1, changed_at = ?, "
        f"{changes} WHERE id = ? AND fence = ? AND state = 'leased' "
        "RETURNING seq, consumer, size, num_events",
        (target, event, transaction.now, *values, lease.rollout_id, lease.fence),
    ).fetchone()
    if moved is None:
        _check_reported(transaction, lease, event)
        return None
    seq, consumer, size, number = moved
    transaction.log(seq, number, event, detail)
    transaction.shift(consumer, size, "leased", target)
    return int(seq)


def _check_reported(transaction: Transaction, lease: Lease, event: EventName) -> None:
    """Check that this very report was made before: its answer may have been lost."""
    row = transaction.db.execute(
        "SELECT fence, report, state FROM rollouts WHERE id = ?", (lease.rollout_id,)
    ).fetchone()
    if row is None or row[:2] != (lease.fence, event):
        raise fenced(lease.rollout_id, lease.fence, None if row is None else row[2])
