"""The graph of a version's calls: their order follows from the keys that they read and add."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from headway.contracts.errors import ConfigError
from trainer.dataflow.call import Call


class Dataflow:
    """Calls in an order in which they can run; every key has one producer."""

    def __init__(
        self,
        calls: Sequence[Call],
        ranks: Mapping[str, frozenset[int]] | None = None,
        is_serial: bool = False,
    ) -> None:
        """
        Args:
            ranks: that each call runs on; None runs all of them on the same.
            is_serial: calls of models that have a rank in common run one after another.
        Raises:
            ConfigError: two calls of one name, two producers of a key, a key without a producer, or
                a cycle; the calls are named.
        """
        _refuse_repeated_names(calls)
        self.producers = _producers(calls)
        """Key -> the name of the call that adds it."""
        self._ranks = ranks
        self._is_serial = is_serial
        by_name = {call.name: call for call in calls}
        waits = {call.name: self._sources(call) for call in calls}
        order = _ordered(calls, waits)
        self.calls: tuple[Call, ...] = tuple(by_name[name] for name in order)
        """The order is the same in every process."""
        self.waits: dict[str, frozenset[str]] = {
            call.name: frozenset(waits[call.name] | self._before(call)) for call in self.calls
        }
        """Call -> those that must be done before it: its producers, and the call before it on its
        model."""

    @property
    def edges(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """(producer, reader) -> the keys between them."""
        found: dict[tuple[str, str], tuple[str, ...]] = {}
        for call in self.calls:
            for key in call.input_keys:
                edge = (self.producers[key], call.name)
                found[edge] = (*found.get(edge, ()), key)
        return found

    @property
    def levels(self) -> list[list[Call]]:
        """Calls by the longest way from a source: those of one level need nothing of one another."""
        depth: dict[str, int] = {}
        rows: list[list[Call]] = []
        for call in self.calls:
            before = [depth[name] for name in self._sources(call)]
            depth[call.name] = max(before, default=-1) + 1
            if depth[call.name] == len(rows):
                rows.append([])
            rows[depth[call.name]].append(call)
        return rows

    @property
    def model_calls(self) -> tuple[Call, ...]:
        """Calls of models: all except those that bring rows or are mere arithmetic."""
        return tuple(call for call in self.calls if call.kind not in ("data", "compute"))

    def _sources(self, call: Call) -> set[str]:
        for key in call.input_keys:
            if key not in self.producers:
                near = difflib.get_close_matches(key, self.producers, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "name a call that outputs it"
                raise ConfigError(
                    f"call {call.name!r} reads {key!r}, which no call outputs; {hint}"
                )
        return {self.producers[key] for key in call.input_keys}

    def _before(self, call: Call) -> set[str]:
        """The call before this one on the same model; updates of models on the same ranks follow one
        another, so that a rank holds the activations of one of them at a time."""
        earlier = self.calls[: self.calls.index(call)]
        same = [c.name for c in earlier if call.model is not None and c.model == call.model]
        overlapping = [c for c in earlier if self._meet(c, call)]
        updates = {c.name for c in overlapping if call.kind == c.kind == "train_step"}
        is_serial = self._is_serial and call.model is not None
        serial = {c.name for c in overlapping if is_serial and c.model is not None}
        return {*same[-1:], *updates, *serial}

    def _meet(self, one: Call, other: Call) -> bool:
        """True if some rank runs both."""
        if self._ranks is None:
            return True
        return not self._ranks[one.name].isdisjoint(self._ranks[other.name])


def _refuse_repeated_names(calls: Sequence[Call]) -> None:
    counts = Counter(call.name for call in calls)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise ConfigError(f"calls {repeated} are there twice; give each a name of its own")


def _producers(calls: Sequence[Call]) -> dict[str, str]:
    producers: dict[str, str] = {}
    for call in calls:
        for key in call.output_keys:
            if key in producers:
                raise ConfigError(
                    f"{key!r} is output by {producers[key]!r} and by {call.name!r}; rename one, or "
                    "leave one call out"
                )
            producers[key] = call.name
    return producers


def _ordered(calls: Sequence[Call], waits: dict[str, set[str]]) -> list[str]:
    sorter = TopologicalSorter({call.name: sorted(waits[call.name]) for call in calls})
    try:
        return list(sorter.static_order())
    except CycleError as error:
        path = " -> ".join(reversed(error.args[1]))
        raise ConfigError(
            f"calls wait for one another: {path}; remove one of their keys"
        ) from error
