"""Number of generation servers by state; units are in the names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.contracts.http.servers import ServerState, ServerStatus

STATES: tuple[ServerState, ...] = get_args(ServerState)


def show_fleet(
    registry: CollectorRegistry,
    statuses: Callable[[], Sequence[ServerStatus]],
    num_quarantines: Callable[[], int],
) -> None:
    """Show a fleet as it is whenever metrics are read.

    Args:
        registry: where.
        statuses: every server that was seen lately.
        num_quarantines: that began since this process did.
    """
    registry.register(_FleetCollector(statuses, num_quarantines))


class _FleetCollector(Collector):
    def __init__(
        self,
        statuses: Callable[[], Sequence[ServerStatus]],
        num_quarantines: Callable[[], int],
    ) -> None:
        self._statuses = statuses
        self._num_quarantines = num_quarantines

    def describe(self) -> Iterator[Metric]:
        return iter(())  # registering must not ask a fleet that is not made yet

    def collect(self) -> Iterator[Metric]:
        found = Counter(status.state for status in self._statuses())
        servers = GaugeMetricFamily(
            "headway_fleet_servers", "Generation servers by state", labels=["state"]
        )
        for state in STATES:
            servers.add_metric([state], found[state])
        yield servers
        yield CounterMetricFamily(
            "headway_fleet_quarantines",
            "Times that a server was taken out of traffic for failing requests",
            self._num_quarantines(),
        )
