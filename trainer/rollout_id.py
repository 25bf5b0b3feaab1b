"""Ids of the rollouts that a trainer submits: the run, and the position of the prompt in its data.

An id follows from both, so submitting again after a crash submits nothing twice, and the position can be
read back from a trajectory.
"""

from __future__ import annotations


def rollout_id_of(run_id: str, position: int) -> str:
    """Return the id of the rollout of the prompt at `position` in the order of the data."""
    return f"{run_id}.{position}"


def position_of(rollout_id: str) -> int:
    """Return the position that `rollout_id_of` was given.

    Raises:
        ValueError: the id was made by something else.
    """
    return int(rollout_id.rpartition(".")[2])
