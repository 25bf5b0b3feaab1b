"""From submission to the end of an attempt, on SQLite."""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Sequence

from headway.contracts.http.rollouts import RolloutState
from headway.contracts.types import PolicyVersion, RolloutRequest
from headway.rollout.ledger.base import Admission, Lease
from headway.rollout.ledger.on_sqlite.schema import PENDING
from headway.rollout.ledger.on_sqlite.transaction import Transaction
from headway.rollout.ledger.refusals import other_content, queue_full
from headway.rollout.ledger.transitions import NEXT_STATE, EventName, fenced

BOUNDED_STATES: tuple[RolloutState, ...] = ("leased", "ready", "delivered", "consumed")
"""What counts against `Admission.budget`."""

INSERT = (
    "INSERT INTO rollouts (id, consumer, request, size, priority, min_version, state, num_events, "
    "submitted_at, since, timeout_s, deadline, changed_at) "
    "VALUES (?1, ?2, ?3, ?4, ?5, ?6, 'queued', 1, ?7, ?7, ?8, ?7 + ?8, ?7) "
    "ON CONFLICT (id) DO NOTHING RETURNING seq"
)


def submit(
    transaction: Transaction,
    requests: Sequence[tuple[RolloutRequest, str]],
    max_queued: int,
    max_queued_each: int | None,
) -> list[bool]:
    """Queue requests, each with its JSON."""
    new = [_insert(transaction, request, text) for request, text in requests]
    if any(new):
        _check_room(transaction, requests, max_queued, max_queued_each)
    return new


def _insert(transaction: Transaction, request: RolloutRequest, text: str) -> bool:
    size = request.prompt.group_size
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
    requests: Sequence[tuple[RolloutRequest, str]],
    max_queued: int,
    max_queued_each: int | None,
) -> None:
    _, queued = transaction.tally("queued")
    if queued > max_queued:
        raise queue_full(queued, max_queued)
    if max_queued_each is None:
        return
    for consumer in {request.consumer for request, _ in requests}:
        _, queued = transaction.tally("queued", consumer)
        if queued > max_queued_each:
            raise queue_full(queued, max_queued_each, consumer)


def lease(transaction: Transaction, admission: Admission) -> list[Lease]:
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


def _budget(transaction: Transaction, admission: Admission) -> int:
    """Trajectories of the attached consumer that may start."""
    if admission.consumer is None or admission.budget is None:
        return admission.free
    held = transaction.trajectories(admission.consumer)
    return admission.budget - sum(held[state] for state in BOUNDED_STATES)


def _line(
    transaction: Transaction, consumers: Sequence[str], admission: Admission
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
        "SELECT seq, consumer, size, state, num_events, timeout_s FROM rollouts "
        f"WHERE {PENDING} AND deadline <= ?",
        (transaction.now,),
    ).fetchall()
    for seq, consumer, size, state, number, timeout_s in rows:
        reason = f"its timeout_s={timeout_s:g} passed while it was {state}"
        transaction.db.execute(
            "UPDATE rollouts SET state = 'failed', reason = ?, num_events = num_events + 1, "
            "changed_at = ? WHERE seq = ?",
            (reason, transaction.now, seq),
        )
        transaction.log(seq, number + 1, "time_out", reason)
        transaction.shift(consumer, size, state, "failed")
    return len(rows)


def requeue_leased(
    transaction: Transaction, reason: str, where: str = "", values: tuple[float, ...] = ()
) -> int:
    """Put leased rollouts back whose owners are gone; `{}` in the reason becomes the owner."""
    rows = transaction.db.execute(
        f"SELECT seq, consumer, size, num_events, owner FROM rollouts WHERE state = 'leased' {where}",
        values,
    ).fetchall()
    for seq, consumer, size, number, owner in rows:
        detail = reason.format(repr(owner))
        transaction.db.execute(
            "UPDATE rollouts SET state = 'queued', reason = ?, num_events = num_events + 1, "
            "changed_at = ? WHERE seq = ?",
            (detail, transaction.now, seq),
        )
        transaction.log(seq, number + 1, "requeue", detail)
        transaction.shift(consumer, size, "leased", "queued")
    return len(rows)


def complete(
    transaction: Transaction,
    taken: Lease,
    oldest_version: PolicyVersion,
    mean_reward: float,
    payload: bytes,
) -> None:
    """Store the result of an attempt."""
    detail = f"oldest_version={oldest_version}"
    seq = _report(
        transaction,
        taken,
        "complete",
        detail,
        "oldest_version = ?, mean_reward = ?, has_payload = 1",
        (oldest_version, mean_reward),
    )
    if seq is not None:
        transaction.db.execute("INSERT OR REPLACE INTO payloads VALUES (?, ?)", (seq, payload))


def end_attempt(
    transaction: Transaction,
    taken: Lease,
    event: EventName,
    reason: str,
    mean_reward: float | None = None,
) -> None:
    """`filter`, `fail` or `requeue`."""
    _report(transaction, taken, event, reason, "reason = ?, mean_reward = ?", (reason, mean_reward))


def _report(
    transaction: Transaction,
    taken: Lease,
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
        (target, event, transaction.now, *values, taken.rollout_id, taken.fence),
    ).fetchone()
    if moved is None:
        _check_reported(transaction, taken, event)
        return None
    seq, consumer, size, number = moved
    transaction.log(seq, number, event, detail)
    transaction.shift(consumer, size, "leased", target)
    return int(seq)


def _check_reported(transaction: Transaction, taken: Lease, event: EventName) -> None:
    """Whether this very report was made before: its answer may have been lost."""
    row = transaction.db.execute(
        "SELECT fence, report, state FROM rollouts WHERE id = ?", (taken.rollout_id,)
    ).fetchone()
    if row is None or row[:2] != (taken.fence, event):
        raise fenced(taken.rollout_id, taken.fence, None if row is None else row[2])
