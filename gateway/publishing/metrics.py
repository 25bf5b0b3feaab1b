"""Metrics of a gateway's publications: how long they took, and how they ended; units are in the
names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headway.contracts.http.weights import WeightStatus
from headway.runtime.metrics import counted_outcome

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class PublicationMetrics:
    """Everything begins at zero with the process."""

    def __init__(self, registry: CollectorRegistry, status: Callable[[], WeightStatus]) -> None:
        self._registry = registry
        self._outcomes = Counter(
            "headway_weight_publications",
            "Transactions that ended: committed, cancelled (its publisher gave it up), or an error's "
            "code",
            ["outcome"],
            registry=registry,
        )
        self.staging_s = self._histogram(
            "staging", "Seconds from the announcement to the quorum, upload included"
        )
        self.commit_s = self._histogram("commit", "Seconds from the record to the last swap")
        self._gauge("epoch", "Number of the last transaction", lambda: status().epoch)
        self._gauge(
            "publishing", "Transactions under way", lambda: int(status().publishing is not None)
        )

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one transaction by how the block ends."""
        with counted_outcome(self._outcomes, lambda: "committed"):
            yield

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(
            f"headway_weight_{name}_seconds", meaning, buckets=BUCKETS_S, registry=self._registry
        )

    def _gauge(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        gauge = Gauge(f"headway_weight_{name}", meaning, registry=self._registry)
        gauge.set_function(read)
