"""`DeliveryQueue` on SQLite: from a ready group to its consumption."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from gateway.ledger.on_sqlite.transaction import Transaction
from gateway.ledger.records import Delivery
from gateway.ledger.refusals import (
    forgotten,
    given_out,
    never_submitted,
    rollouts_failed,
    used_by_others,
)
from gateway.ledger.transitions import WITHOUT_RESULT, illegal, unknown
from headway.contracts.http.rollouts import RolloutState
from headway.contracts.types import PolicyVersion


class _DeliveryRow(NamedTuple):
    seq: int
    id: str
    state: str
    reason: str | None
    payload: bytes


def deliver(
    transaction: Transaction,
    delivery_id: str,
    count: int,
    consumer: str,
    version: PolicyVersion,
    max_staleness: int | None,
    learner: PolicyVersion | None = None,
) -> Delivery:
    """Give out the consumer's oldest ready groups."""
    before = _delivered_before(transaction, delivery_id)
    if before is not None:
        if {name for _, name, _ in before} != {consumer}:
            raise used_by_others(delivery_id)
        return Delivery(tuple(payload for _, _, payload in before), 0, 0)
    due = None if max_staleness is None else version - max_staleness
    learner = max(version, learner or 0)
    dropped = 0
    if max_staleness is not None:
        dropped = _drop_stale(transaction, consumer, learner, max_staleness)
    num_ready, _ = transaction.tally("ready", consumer)
    if num_ready < count:
        return Delivery(None, num_ready, dropped)
    if due is not None and _is_in_play(transaction, consumer, due):
        return Delivery(None, num_ready, dropped, is_held_back=True)
    index, order = ("in_line", "seq") if due is None else ("ready", "oldest_version, seq")
    chosen = transaction.db.execute(
        f"SELECT seq, payload FROM rollouts INDEXED BY {index} JOIN payloads USING (seq) "
        f"WHERE state = 'ready' AND consumer = ? ORDER BY {order} LIMIT ?",
        (consumer, count),
    ).fetchall()
    return _give_out(transaction, delivery_id, chosen, learner, num_ready, dropped)


def deliver_exactly(
    transaction: Transaction,
    delivery_id: str,
    rollout_ids: Sequence[str],
    version: PolicyVersion,
) -> Delivery:
    """Give out these groups, or none."""
    before = _delivered_before(transaction, delivery_id)
    if before is not None:
        if {name for name, _, _ in before} != set(rollout_ids):
            raise used_by_others(delivery_id)
        return Delivery(tuple(payload for _, _, payload in before), 0, 0)
    rows = [_row(transaction, rollout_id) for rollout_id in dict.fromkeys(rollout_ids)]
    if ended := [(row.id, row.state, row.reason) for row in rows if row.state in WITHOUT_RESULT]:
        raise rollouts_failed(ended)
    if gone := [row.id for row in rows if row.state in ("delivered", "consumed")]:
        raise given_out(gone[0])
    ready = [(row.seq, row.payload) for row in rows if row.state == "ready"]
    if len(ready) < len(set(rollout_ids)):
        return Delivery(None, len(ready), 0)
    return _give_out(transaction, delivery_id, ready, version, len(ready))


def _delivered_before(
    transaction: Transaction, delivery_id: str
) -> list[tuple[str, str, bytes]] | None:
    """Id, consumer and payload of each group that this delivery gave out."""
    rows = transaction.db.execute(
        "SELECT id, consumer, payload FROM rollouts LEFT JOIN payloads USING (seq) "
        "WHERE delivery_id = ? AND state IN ('delivered', 'consumed') ORDER BY seq",
        (delivery_id,),
    ).fetchall()
    if any(payload is None for _, _, payload in rows):
        raise forgotten(delivery_id)
    return rows or None


def _drop_stale(
    transaction: Transaction, consumer: str, version: PolicyVersion, max_staleness: int
) -> int:
    rows = transaction.db.execute(
        "UPDATE rollouts SET state = 'stale', has_payload = 0, num_events = num_events + 1, "
        "changed_at = ?, reason = 'version ' || ? || ' is too far from version ' || oldest_version "
        "WHERE state = 'ready' AND consumer = ? AND oldest_version < ? "
        "RETURNING seq, size, num_events, oldest_version",
        (transaction.now, version, consumer, version - max_staleness),
    ).fetchall()
    for seq, size, number, oldest in rows:
        transaction.log(seq, number, "drop", f"version={version} oldest_version={oldest}")
        transaction.shift(consumer, size, "ready", "stale")
        transaction.db.execute("DELETE FROM payloads WHERE seq = ?", (seq,))
    return sum(size for _, size, _, _ in rows)


def _is_in_play(transaction: Transaction, consumer: str, due: PolicyVersion) -> bool:
    """True if a group admitted by then is still being run."""
    row = transaction.db.execute(
        "SELECT 1 FROM rollouts WHERE state = 'leased' AND consumer = ? AND admitted <= ? LIMIT 1",
        (consumer, due),
    ).fetchone()
    return row is not None


def _row(transaction: Transaction, rollout_id: str) -> _DeliveryRow:
    row = transaction.db.execute(
        "SELECT seq, id, state, reason, payload FROM rollouts LEFT JOIN payloads USING (seq) "
        "WHERE id = ?",
        (rollout_id,),
    ).fetchone()
    if row is None:
        raise never_submitted(rollout_id)
    return _DeliveryRow(*row)


def _give_out(
    transaction: Transaction,
    delivery_id: str,
    chosen: Sequence[tuple[int, bytes]],
    version: PolicyVersion,
    num_ready: int,
    dropped: int = 0,
) -> Delivery:
    moved = transaction.db.execute(
        "UPDATE rollouts SET state = 'delivered', delivery_id = ?, staleness = ? - oldest_version, "
        "num_events = num_events + 1, changed_at = ? WHERE seq IN (SELECT value FROM json_each(?)) "
        "RETURNING seq, consumer, size, num_events, oldest_version",
        (delivery_id, version, transaction.now, json.dumps([seq for seq, _ in chosen])),
    ).fetchall()
    given = []
    for seq, consumer, size, number, oldest in sorted(moved):
        transaction.log(seq, number, "deliver", f"version={version} oldest_version={oldest}")
        transaction.shift(consumer, size, "ready", "delivered")
        given.append((version - oldest, size))
    payloads = tuple(payload for _, payload in sorted(chosen))
    return Delivery(payloads, num_ready, dropped, given=tuple(given))


def outstanding(transaction: Transaction, consumer: str) -> int:
    """Groups that the consumer may still be given."""
    states: tuple[RolloutState, ...] = ("queued", "leased", "ready")
    return sum(transaction.tally(state, consumer)[0] for state in states)


def consume(
    transaction: Transaction, rollout_ids: Sequence[str], step: int, checkpoint_step: int
) -> None:
    """Record consumption, and forget the payloads that a checkpoint made needless."""
    moved = transaction.db.execute(
        "UPDATE rollouts SET state = 'consumed', step = ?, num_events = num_events + 1, "
        "changed_at = ? WHERE id IN (SELECT value FROM json_each(?)) AND state = 'delivered' "
        "RETURNING id, seq, consumer, size, num_events",
        (step, transaction.now, json.dumps(rollout_ids)),
    ).fetchall()
    for _, seq, consumer, size, number in moved:
        transaction.log(seq, number, "consume", f"step={step}")
        transaction.shift(consumer, size, "delivered", "consumed")
    others = set(rollout_ids).difference(row[0] for row in moved)
    consumers = {row[2] for row in moved}
    consumers |= {_consumer_of(transaction, rollout_id, step) for rollout_id in sorted(others)}
    for consumer in consumers:
        rows = transaction.db.execute(
            "UPDATE rollouts SET has_payload = 0 WHERE state = 'consumed' AND consumer = ? "
            "AND has_payload = 1 AND step <= ? RETURNING seq",
            (consumer, checkpoint_step),
        ).fetchall()
        transaction.db.executemany("DELETE FROM payloads WHERE seq = ?", rows)


def _consumer_of(transaction: Transaction, rollout_id: str, step: int) -> str:
    """The consumer of a rollout that this step has consumed before."""
    row = transaction.db.execute(
        "SELECT consumer, state, step FROM rollouts WHERE id = ?", (rollout_id,)
    ).fetchone()
    if row is None:
        raise unknown(rollout_id)
    consumer, state, recorded = row
    if (state, recorded) != ("consumed", step):
        raise illegal(rollout_id, "consume", state if recorded is None else f"{state}({recorded})")
    return str(consumer)


def give_back(transaction: Transaction, consumer: str, step: int) -> int:
    """Undo deliveries and consumptions that the consumer's checkpoint lacks."""
    rows = transaction.db.execute(
        "SELECT seq, size, state, num_events, has_payload FROM rollouts "
        "WHERE consumer = ?1 AND state = 'delivered' UNION ALL "
        "SELECT seq, size, state, num_events, has_payload FROM rollouts "
        "WHERE consumer = ?1 AND state = 'consumed' AND has_payload IN (0, 1) AND step > ?2",
        (consumer, step),
    ).fetchall()
    for seq, size, state, number, has_payload in rows:
        target = "ready" if has_payload else "queued"
        transaction.db.execute(
            "UPDATE rollouts SET state = ?, delivery_id = NULL, step = NULL, staleness = NULL, "
            "attempt = 0, since = ?2, deadline = ?2 + timeout_s, num_events = num_events + 1, "
            "changed_at = ?2 WHERE seq = ?3",
            (target, transaction.now, seq),
        )
        event = "give_back" if has_payload else "replay"
        transaction.log(seq, number + 1, event, f"checkpoint_step={step}")  # type: ignore[arg-type]
        transaction.shift(consumer, size, state, target)  # type: ignore[arg-type]
    return len(rows)
