"""Cost of each fault of `chaos.py`: the consumption that was measured, beside what it would have been."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Fault, and its time (`time.time`)."""

    kind: str
    at: float


@dataclass(frozen=True)
class Consumed:
    """A step's trajectories, and when it was taken to train on them (`time.time`)."""

    rows: int
    at: float


@dataclass
class Cost:
    """Cost of all faults of one kind: from each to the next fault of any kind."""

    count: int = 0
    seconds: float = 0.0
    rows: int = 0

    def shown(self, calm_per_s: float) -> dict[str, float]:
        """Return metrics; `cost_s` is the mean time in which nothing would have been consumed."""
        share = self.rows / (calm_per_s * self.seconds)
        return {
            "goodput_share": round(share, 2),
            "cost_s": round((1.0 - share) * self.seconds / self.count, 1),
        }


def per_s(consumed: Iterable[Consumed], spans: Sequence[tuple[float, float]]) -> float:
    """Trajectories per second within these spans of time."""
    return rows_in(consumed, spans) / sum(end - begin for begin, end in spans)


def rows_in(consumed: Iterable[Consumed], spans: Sequence[tuple[float, float]]) -> int:
    """Trajectories within these spans of time."""
    return sum(one.rows for one in consumed if any(begin <= one.at < end for begin, end in spans))


def cost_per_kind(
    faults: Sequence[Fault], consumed: Sequence[Consumed], end: float
) -> dict[str, Cost]:
    """Every moment from the first fault to `end` is charged to the last fault before it."""
    costs: defaultdict[str, Cost] = defaultdict(Cost)
    ends = [fault.at for fault in faults[1:]] + [end]
    for fault, until in zip(faults, ends, strict=True):
        cost = costs[fault.kind]
        cost.count += 1
        cost.seconds += until - fault.at
        cost.rows += rows_in(consumed, [(fault.at, until)])
    return dict(costs)
