"""Drops groups that are too hard or too easy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headway.contracts.errors import ConfigError
from headway.contracts.types import TrajectoryGroup


class RewardRange:
    """Keeps a group whose mean reward is strictly between `low` and `high`."""

    def __init__(
        self,
        low: Annotated[float, Field(allow_inf_nan=False)] = 0.0,
        high: Annotated[float, Field(allow_inf_nan=False)] = 1.0,
    ) -> None:
        if low >= high:
            raise ConfigError(f"low={low:g} is not below high={high:g}; no group would be kept")
        self._low = low
        self._high = high

    def keep(self, group: TrajectoryGroup) -> str | None:
        mean = group.mean_reward
        if mean <= self._low:
            return f"mean reward is not above {self._low:g}"
        return f"mean reward is not below {self._high:g}" if mean >= self._high else None
