"""The metrics of every step: into the journal of the run folder, and into sinks that may fail.

A run is followed and summed up by its journal, so a failure of it ends the run. A sink's does not:
it is logged once and counted (`sink_failures`), and the sink is tried again at the next step. One that
could not be opened stays closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.contracts.config.experiment import ExperimentConfig
from headway.contracts.errors import ConfigError
from headway.runtime.journal import METRICS_NAME, MetricsJournal
from trainer.topology import Topology
from trainer.tracking.base import SINKS, Metrics, RunDescription, Sink
from trainer.tracking.lineage import record_lineage

log = logging.getLogger(__name__)


class Tracker:
    """Writes steps; a tracker without journal (`None` as its path) and sinks writes nothing."""

    def __init__(self, journal: MetricsJournal, description: RunDescription | None = None) -> None:
        """
        Raises:
            ConfigError: no such sink, or its package is not installed.
        """
        self._journal = journal
        self._failures = 0
        self._failed: set[str] = set()
        self._sinks: dict[str, Sink] = {}
        if description is not None:
            self._open(description)

    def write(self, metrics: Metrics) -> None:
        """One step."""
        metrics = {**metrics, "sink_failures": self._failures}
        self._journal.write(metrics)
        for name, sink in self._sinks.items():
            with self._tolerating(name):
                sink.write(metrics)

    def close(self) -> None:
        """Close all."""
        for name, sink in self._sinks.items():
            with self._tolerating(name):
                sink.close()
        self._journal.close()

    def _open(self, description: RunDescription) -> None:
        factories = {name: _factory(name) for name in description.settings.sinks}
        for name, factory in factories.items():
            with self._tolerating(name):
                self._sinks[name] = factory(description)

    @contextmanager
    def _tolerating(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 # a boundary: the run is worth more than its curves
            self._failures += 1
            if name not in self._failed:
                self._failed.add(name)
                reason = f"{type(error).__name__}: {error}"
                log.warning("a metrics sink failed", extra={"sink": name, "reason": reason})


def open_tracker(
    config: ExperimentConfig, topology: Topology, run_id: str, first_step: int = 0
) -> Tracker:
    """The tracker of this rank; the first one writes, and records where the run comes from."""
    folder = Path(config.run_dir)
    if not topology.is_main:
        return Tracker(MetricsJournal(None))
    description = RunDescription(
        run_id=run_id,
        name=config.metrics.run_name or folder.resolve().name,
        folder=folder,
        first_step=first_step,
        settings=config.metrics,
        config=config.model_dump(mode="json"),
        lineage=record_lineage(config, folder, run_id, first_step),
    )
    return Tracker(MetricsJournal(folder / METRICS_NAME), description)


def _factory(name: str) -> Callable[[RunDescription], Sink]:
    try:
        return SINKS.get(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"metrics.sinks names {name}, and the package {error.name} is not installed; "
            "install Headway with the extra 'tracking'"
        ) from error
