"""Prometheus text from a service's status; units are in the names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.contracts.errors import ServiceError
from headway.contracts.http.servers import ServerStatus
from headway.contracts.http.status import StatusResponse

METRICS_TYPE = "text/plain; version=0.0.4"


@contextmanager
def counted_outcome(counter: Counter, success: Callable[[], str]) -> Iterator[None]:
    """Count a block by how it ends: `success()`, the code of an error, `cancelled` or `internal`.

    Args:
        counter: with the label `outcome` alone.
    """
    outcome = "internal"
    try:
        yield
        outcome = success()
    except ServiceError as error:
        outcome = error.code
        raise
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    finally:
        counter.labels(outcome).inc()


class StatusCollector(Collector):
    """The metrics of one status."""

    def __init__(self, status: StatusResponse) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield GaugeMetricFamily(
            "headway_weight_version", "Committed policy version", status.version
        )
        yield GaugeMetricFamily(
            "headway_weight_head_version", "Newest published policy version", status.head
        )
        yield GaugeMetricFamily(
            "headway_rollout_running_trajectories", "Running trajectories", status.running
        )
        yield GaugeMetricFamily(
            "headway_rollout_capacity_trajectories",
            "Trajectories that may start now",
            status.capacity,
        )
        yield CounterMetricFamily(
            "headway_weight_updates", "Committed weight updates", status.updates
        )
        yield CounterMetricFamily(
            "headway_weight_updates_in_flight",
            "Committed weight updates while sequences were being generated",
            status.updates_in_flight,
        )
        yield CounterMetricFamily(
            "headway_generated_tokens", "Tokens sampled", status.generated_tokens
        )
        yield GaugeMetricFamily(
            "headway_event_loop_longest_stall_seconds",
            "Longest stand-still of the event loop since it serves",
            status.longest_stall_s,
        )
        yield CounterMetricFamily(
            "headway_event_loop_stalls",
            "Stand-stills of the event loop of 0.1 s or longer",
            status.stalls,
        )
        ledger = GaugeMetricFamily(
            "headway_ledger_trajectories", "Trajectories by state", labels=["state"]
        )
        for state, count in status.counts.model_dump().items():
            ledger.add_metric([state], count)
        yield ledger
        yield from self._of_servers()

    def _of_servers(self) -> Iterator[Metric]:
        servers = self._status.servers
        gauges: dict[str, tuple[str, Callable[[ServerStatus], float]]] = {
            "weight_version": ("Version that a server samples with", lambda s: s.version),
            "running_sequences": ("Sequences being generated", lambda s: s.running),
            "queued_sequences": ("Sequences that wait for a place", lambda s: s.queued),
            "kv_usage": ("Share of the key-value cache in use", lambda s: s.kv_usage),
        }
        counters: dict[str, tuple[str, Callable[[ServerStatus], float]]] = {
            "generated_tokens": ("Tokens sampled by a server", lambda s: s.generated_tokens),
            "busy_seconds": ("Seconds with work", lambda s: s.busy_s),
            "preemptions": ("Sequences that lost their cache", lambda s: s.preemptions),
        }
        for kind, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (meaning, read) in figures.items():
                family = kind(f"headway_server_{name}", meaning, labels=["server"])
                for server in servers:
                    family.add_metric([server.server_id], read(server))
                yield family


def render_metrics(status: StatusResponse, more: CollectorRegistry | None = None) -> bytes:
    """The `/metrics` page: metrics of every rollout service, and those that this kind of process adds."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    return generate_latest(registry) + (b"" if more is None else generate_latest(more))
