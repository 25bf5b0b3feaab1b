"""State machine of rollouts: the one table of events and states that every store obeys."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from headway.contracts.errors import Conflict, Fenced, NotFound
from headway.contracts.http.ledger import LedgerCounts
from headway.contracts.http.rollouts import RolloutState

EventName = Literal[
    "submit",
    "lease",
    "requeue",
    "complete",
    "filter",
    "fail",
    "time_out",
    "deliver",
    "drop",
    "consume",
    "give_back",
    "replay",
    "cancel",
    "revive",
]

NEXT_STATE: Mapping[EventName, tuple[tuple[RolloutState | None, ...], RolloutState]] = (
    MappingProxyType(
        {
            "submit": ((None,), "queued"),
            "lease": (("queued",), "leased"),
            "requeue": (("leased",), "queued"),
            "complete": (("leased",), "ready"),
            "filter": (("leased",), "filtered"),
            "fail": (("leased",), "failed"),
            "time_out": (("queued", "leased"), "failed"),
            "deliver": (("ready",), "delivered"),
            "drop": (("ready",), "stale"),
            "consume": (("delivered",), "consumed"),
            "give_back": (("delivered", "consumed"), "ready"),
            "replay": (("consumed",), "queued"),
            "cancel": (("queued", "leased", "ready", "delivered"), "cancelled"),
            "revive": (("failed",), "queued"),
        }
    )
)
"""Event -> (states it may leave, state it enters)."""

STATES: tuple[RolloutState, ...] = get_args(RolloutState)
ENDED: tuple[RolloutState, ...] = ("consumed", "failed", "filtered", "stale", "cancelled")
WITHOUT_RESULT: tuple[RolloutState, ...] = ("failed", "filtered", "stale", "cancelled")
"""Ended without a result that could still be given out."""


def unknown(rollout_id: str) -> NotFound:
    """No such rollout."""
    return NotFound(f"no rollout {rollout_id!r} in the ledger")


def illegal(rollout_id: str, event: EventName, state: str) -> Conflict:
    """A state that the event may not leave."""
    sources, _ = NEXT_STATE[event]
    return Conflict(f"rollout {rollout_id!r} is {state}; {event} needs {sorted(map(str, sources))}")


def fenced(rollout_id: str, fence: int, state: str | None) -> Fenced:
    """A report under a lease that has ended."""
    return Fenced(
        f"lease {fence} of rollout {rollout_id!r} has ended (the rollout is {state or 'forgotten'} now); "
        "drop its result"
    )


def counts_of(trajectories: Mapping[RolloutState, int]) -> LedgerCounts:
    """Trajectories by state, and their sum."""
    by_name: dict[str, int] = {str(state): number for state, number in trajectories.items()}
    return LedgerCounts(submitted=sum(by_name.values()), **by_name)
