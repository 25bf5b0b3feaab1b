"""Counts and audit of the ledger."""

from __future__ import annotations

from headway.contracts.config.base import Config


class LedgerCounts(Config):
    """Trajectories by state of their rollout; the states are disjoint and cover all."""

    submitted: int = 0
    queued: int = 0
    leased: int = 0
    ready: int = 0
    delivered: int = 0
    consumed: int = 0
    failed: int = 0
    filtered: int = 0
    stale: int = 0
    cancelled: int = 0


class LedgerAudit(Config):
    """The ledger's own audit, recomputed from its append-only event log."""

    counts: LedgerCounts
    lost: int
    """Trajectories whose events end in no known state, or whose state contradicts their events."""
    duplicated: int
    """Consumptions of a rollout beyond the first that was not given back."""
    max_staleness: int
    """Largest staleness at delivery among consumed trajectories, in versions."""
    requeues: int
    """Attempts that ended without a result and were tried again."""
