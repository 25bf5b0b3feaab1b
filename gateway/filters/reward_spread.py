"""Drops groups whose siblings earned the same: their advantages are zero."""

from __future__ import annotations

from statistics import pstdev
from typing import Annotated

from pydantic import Field

from headway.contracts.types import TrajectoryGroup


class RewardSpread:
    """Keeps a group whose rewards have a population standard deviation greater than `above`."""

    def __init__(self, above: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0) -> None:
        self._above = above

    def keep(self, group: TrajectoryGroup) -> str | None:
        spread = pstdev(group.rewards)
        return None if spread > self._above else f"rewards spread no more than {self._above:g}"
