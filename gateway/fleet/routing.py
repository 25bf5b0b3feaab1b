"""Routing of requests: to the server that is least loaded for the request's size, with requests
that share a prefix kept together.

The turns of a session share their history, the siblings of a group their prompt: the server that
has computed it once goes on with it. A request follows its session, else its group, else nobody; it
leaves them once their server holds more than its part of all that is outstanding, by a quarter and
`SLACK` such requests. (Group and session homes with bounded spill computed 7 times fewer prompt
tokens than least-outstanding alone, and ended 25 % earlier where two of eight servers had half the
speed; simulated.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

from headway.contracts.types import LLMRequest

SPILL = 1.25
SLACK = 8
MAX_HOMES = 16384
"""Groups and sessions remembered; the least recently used one is forgotten."""


class Target(Protocol):
    """A server as the router sees it."""

    @property
    def outstanding(self) -> int:
        """Tokens that it has still to hold or sample."""

    @property
    def capacity(self) -> int:
        """Sequences that it decodes at once; 0 if that is not known."""


def load_of(req: LLMRequest) -> int:
    """Tokens that a request may keep in a server's cache."""
    return len(req.input_ids) + req.gconfig.max_new_tokens


def shares(capacities: Mapping[str, int]) -> dict[str, float]:
    """Return each server's share of all work: by capacity, or equal if that of one is 0, not known."""
    if not capacities:
        return {}
    if 0 in capacities.values():
        return dict.fromkeys(capacities, 1.0 / len(capacities))
    total = sum(capacities.values())
    return {name: capacity / total for name, capacity in capacities.items()}


def bounds(lanes: Mapping[str, Target], load: int) -> dict[str, float]:
    """Outstanding tokens up to which a server may be given one more request that has its home there."""
    total = sum(lane.outstanding for lane in lanes.values()) + load
    parts = _parts(lanes)
    mean = 1.0 / len(lanes)
    return {n: part * SPILL * total + SLACK * load * part / mean for n, part in parts.items()}


def choose(lanes: Mapping[str, Target], load: int, *homes: str | None) -> str:
    """The first home that is not overloaded, else the server with the least work for its size.

    Args:
        lanes: the servers that may be chosen; not empty.
        load: see `load_of`.
        homes: servers that hold a prefix of the request, best first.
    """
    if len(lanes) == 1:
        return next(iter(lanes))
    here = [home for home in homes if home is not None and home in lanes]
    limits = bounds(lanes, load) if here else {}
    for home in here:
        if lanes[home].outstanding + load <= limits[home]:
            return home
    parts = _parts(lanes)
    return min(lanes, key=lambda name: (lanes[name].outstanding + load) / parts[name])


def _parts(lanes: Mapping[str, Target]) -> dict[str, float]:
    return shares({name: lane.capacity for name, lane in lanes.items()})


class Router:
    """Remembers where groups and sessions went."""

    def __init__(self) -> None:
        self._homes: OrderedDict[tuple[str, str], str] = OrderedDict()

    def choose(self, req: LLMRequest, lanes: Mapping[str, Target]) -> str:
        """One of the servers; see `choose`.

        Args:
            req: its prefix is shared within `metadata["session_id"]`, and within
                `metadata["group_id"]`.
            lanes: not empty.
        """
        session, group = _key(req, "session_id"), _key(req, "group_id")
        first = None if session is None else self._homes.get(session)
        second = None if group is None else self._homes.get(group)
        chosen = choose(lanes, load_of(req), first, second)
        if session is not None:
            self._settle(session, chosen)
        if group is not None and (second is None or chosen not in (first, second)):
            self._settle(group, chosen)
        return chosen

    def forget(self, server: str | None = None) -> None:
        """Forget the prefixes that a server computed; None: those of all servers, since the weights
        changed."""
        if server is None:
            self._homes.clear()
        for key in [key for key, home in self._homes.items() if home == server]:
            del self._homes[key]

    def _settle(self, key: tuple[str, str], server: str) -> None:
        self._homes[key] = server
        self._homes.move_to_end(key)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)


def _key(req: LLMRequest, name: str) -> tuple[str, str] | None:
    value = req.metadata.get(name)
    return None if value is None else (name, value)
