"""Metrics of one generation server; units are in the names.

Requests are counted as they end; what the backend is doing is read when the page is. Everything
begins at zero with the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from headway.contracts.types import LLMRequest, LLMResponse
from headway.runtime.metrics import counted_outcome
from inference_server.backends.base import Load

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
REQUEST_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class ServerMetrics:
    """Counters and histograms of the requests, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "headway_generation_requests",
            "Requests that ended: ok, interrupt (aborted, with the tokens so far), cancelled (the "
            "client went away), or an error's code",
            ["outcome"],
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "headway_generation_prompt_tokens",
            "Prompt tokens of the requests that were answered",
            registry=self.registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token", "Seconds from arrival to the first token", REQUEST_BUCKETS_S
        )
        self._between_tokens = self._histogram(
            "inter_token", "Mean seconds between the tokens of one request", STEP_BUCKETS_S
        )
        self._latency = self._histogram(
            "request", "Seconds from arrival to the last token", REQUEST_BUCKETS_S
        )

    def watch(self, snapshot: Callable[[], ServerSnapshot]) -> None:
        """Show the server's current state, too, when the page is read."""
        self.registry.register(_SnapshotCollector(snapshot))

    @contextmanager
    def counted(self, req: LLMRequest) -> Iterator[Callable[[LLMResponse], None]]:
        """Count one request by how the block ends; the yielded function takes its response."""
        answered: list[LLMResponse] = []

        def success() -> str:
            self._observe(req, answered[0])
            return "interrupt" if answered[0].stop_reason == "interrupt" else "ok"

        with counted_outcome(self._requests, success):
            yield answered.append

    def _observe(self, req: LLMRequest, response: LLMResponse) -> None:
        self._prompt_tokens.inc(len(req.input_ids))
        self._latency.observe(response.latency_s)
        steps = len(response.output_tokens) - 1
        if steps >= 0:
            self._first_token.observe(response.ttft_s)
        if steps >= 1:
            self._between_tokens.observe((response.latency_s - response.ttft_s) / steps)

    def _histogram(self, name: str, meaning: str, buckets_s: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"headway_generation_{name}_seconds",
            meaning,
            buckets=buckets_s,
            registry=self.registry,
        )


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """State of a server at one moment."""

    load: Load
    in_flight: int
    """Requests in any of its dialects, running or waiting."""
    is_draining: bool
    swaps: int
    swap_s: float
    """Seconds spent in all swaps, with the wait for what a policy lets end first."""


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Callable[[], ServerSnapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterator[Metric]:
        return iter(())  # registering must not ask a backend that is not started

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        load = now.load
        gauges = {
            "in_flight_requests": ("Requests running or waiting", now.in_flight),
            "running_sequences": ("Sequences being decoded", load.running),
            "queued_sequences": ("Sequences that wait", load.queued),
            "kv_tokens": ("Tokens whose keys and values are held", load.kv_tokens),
            "kv_capacity_tokens": (
                "Tokens whose keys and values fit; 0: not known",
                load.kv_capacity_tokens,
            ),
            "draining": ("1 once the server is shutting down", int(now.is_draining)),
        }
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(f"headway_generation_{name}", meaning, value)
        yield CounterMetricFamily(
            "headway_generation_prefill_tokens",
            "Prompt tokens computed; shared ones are not",
            load.prefill_tokens,
        )
        yield CounterMetricFamily(
            "headway_generation_busy_seconds", "Seconds with work", load.busy_s
        )
        yield SummaryMetricFamily(
            "headway_weight_swap_seconds",
            "Exchanges of the weights, with the wait for what the update policy lets end first",
            now.swaps,
            now.swap_s,
        )
