"""`headway ledger show`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from gateway.ledger.base import LedgerReader
from gateway.ledger.records import row_of
from headway.contracts.codec import decode_groups
from headway.contracts.errors import NotFound
from headway.contracts.types import Trajectory


async def show(ledger: LedgerReader, rollout_id: str) -> None:
    """Print a rollout: its row, request, log, and what its trajectories amount to."""
    entry = await ledger.get(rollout_id, with_payload=True)
    if entry is None:
        raise NotFound(
            f"no rollout {rollout_id!r} in this ledger; `headway ledger export` lists what is there"
        )
    shown = row_of(entry) | {
        "request": entry.request.model_dump(mode="json"),
        "events": [asdict(event) for event in await ledger.events(rollout_id)],
    }
    if entry.payload is not None:
        (group,) = decode_groups(entry.payload)
        shown["trajectories"] = [_summary(trajectory) for trajectory in group.trajectories]
    sys.stdout.write(json.dumps(shown, indent=1) + "\n")


def _summary(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "trajectory_id": trajectory.trajectory_id,
        "num_tokens": trajectory.num_tokens,
        "oldest_version": trajectory.oldest_version,
        "reward": trajectory.reward,
        "verdict": trajectory.verdict,
        "stop_reason": trajectory.stop_reason,
        "details": trajectory.details,
    }
