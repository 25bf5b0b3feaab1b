"""Refusals of a ledger, in the same words on every store."""

from __future__ import annotations

from collections.abc import Sequence

from headway.contracts.errors import Conflict, NotFound, QueueFull, RolloutsFailed

MAX_NAMED = 16
"""Number of rollouts that one refusal names; the others are counted."""
MAX_REASON_CHARS = 4000


def other_content(rollout_id: str) -> Conflict:
    """A known id with another request."""
    return Conflict(f"rollout {rollout_id!r} was submitted before with other content; use a new id")


def queue_full(queued: int, most: int, consumer: str | None = None) -> QueueFull:
    """More trajectories than may wait."""
    if consumer is None:
        return QueueFull(
            f"{queued} trajectories would wait, executor.max_queued={most}; submit later"
        )
    return QueueFull(
        f"{queued} trajectories of consumer {consumer!r} would wait, "
        f"executor.max_queued_per_consumer={most}; submit later"
    )


def used_by_others(delivery_id: str) -> Conflict:
    """Another wait came with the same id."""
    return Conflict(f"delivery {delivery_id!r} gave out other groups; use a new id for every wait")


def forgotten(delivery_id: str) -> Conflict:
    """It can be answered no more."""
    return Conflict(
        f"delivery {delivery_id!r} was consumed and checkpointed, its payloads are forgotten; "
        "use a new id for every wait"
    )


def never_submitted(rollout_id: str) -> NotFound:
    """Waited for in vain."""
    return NotFound(f"rollout {rollout_id!r} was never submitted, or was forgotten")


def rollouts_failed(ended: Sequence[tuple[str, str, str | None]]) -> RolloutsFailed:
    """They ended without a result.

    Args:
        ended: id, state and reason of each.
    """
    reasons = [
        f"rollout {rollout_id!r} is {state}: {(reason or 'no reason kept')[:MAX_REASON_CHARS]}"
        for rollout_id, state, reason in ended[:MAX_NAMED]
    ]
    more = [f"and {len(ended) - MAX_NAMED} more"] if len(ended) > MAX_NAMED else []
    return RolloutsFailed("; ".join(reasons + more))


def given_out(rollout_id: str) -> Conflict:
    """Another delivery has it."""
    return Conflict(f"rollout {rollout_id!r} was given out before")


def no_such_page(rollout_id: str) -> NotFound:
    """The page before ended with a rollout that is not there."""
    return NotFound(f"before={rollout_id!r} is not in the ledger; ask for the first page again")
