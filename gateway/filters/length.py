"""Drops groups with answers that are too short, too long or truncated."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headway.contracts.errors import ConfigError
from headway.contracts.types import TrajectoryGroup


class Length:
    """Keeps a group in which every trajectory sampled a number of tokens within bounds."""

    def __init__(
        self,
        min_tokens: Annotated[int, Field(ge=0)] = 0,
        max_tokens: Annotated[int | None, Field(ge=1, description="null: no bound.")] = None,
        max_truncated: Annotated[
            float,
            Field(ge=0.0, le=1.0, description="Share of trajectories that may end for length."),
        ] = 1.0,
    ) -> None:
        if max_tokens is not None and min_tokens > max_tokens:
            raise ConfigError(f"min_tokens={min_tokens} exceeds max_tokens={max_tokens}")
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._max_truncated = max_truncated

    def keep(self, group: TrajectoryGroup) -> str | None:
        sampled = [int(trajectory.loss_mask.sum()) for trajectory in group.trajectories]
        if min(sampled) < self._min_tokens:
            return f"an answer is shorter than {self._min_tokens} tokens"
        if self._max_tokens is not None and max(sampled) > self._max_tokens:
            return f"an answer is longer than {self._max_tokens} tokens"
        cut = sum(trajectory.stop_reason == "length" for trajectory in group.trajectories)
        if cut > self._max_truncated * len(sampled):
            return f"more than {self._max_truncated:g} of the answers were cut off"
        return None
