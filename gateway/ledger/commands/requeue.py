"""`headway ledger requeue`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from gateway.ledger.base import LedgerReader, RolloutQueue
from headway.contracts.errors import Conflict


class RequeueLedger(RolloutQueue, LedgerReader, Protocol):
    """Ledger roles that requeue rollouts, and look them up if they are not."""


async def requeue(ledger: RequeueLedger, rollout_ids: Sequence[str]) -> None:
    """Revive failed rollouts, and fail if one of the others was named."""
    refused = []
    for rollout_id in dict.fromkeys(rollout_ids):
        if await ledger.revive([rollout_id]):
            sys.stdout.write(f"{rollout_id} is queued\n")
            continue
        entry = await ledger.get(rollout_id)
        refused.append(f"{rollout_id} is {'not in the ledger' if entry is None else entry.state}")
    if refused:
        raise Conflict(f"only failed rollouts are queued again: {', '.join(refused)}")
