"""Steps after which something that a `FrequencyConfig` describes is due."""

from __future__ import annotations

import time
from collections.abc import Callable

from headway.contracts.config.frequency import FrequencyConfig
from trainer.topology import Topology


class Timetable:
    """Due by steps, by epochs or by seconds. A step is decided once, equally on every rank."""

    def __init__(
        self,
        every: FrequencyConfig,
        steps_per_epoch: int,
        topology: Topology | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            topology: ranks that decide together; None decides alone.
        """
        self._every = every
        self._steps_per_epoch = steps_per_epoch
        self._topology = topology
        self._clock = clock
        self._last_s = clock()
        self._decided: tuple[int, bool] = (-1, False)

    def is_due(self, step: int) -> bool:
        """True if it has to be done after `step` steps; collective if seconds count."""
        if self._decided[0] != step:
            is_late = self._is_late()  # asked in any case: it is collective
            self._decided = (step, is_late or self._is_counted(step))
        return self._decided[1]

    def _is_counted(self, step: int) -> bool:
        steps, epochs = self._every.every_steps, self._every.every_epochs
        counts = [] if steps is None else [steps]
        counts += [] if epochs is None else [epochs * self._steps_per_epoch]
        return any(step % count == 0 for count in counts)

    def _is_late(self) -> bool:
        every_s, now = self._every.every_s, self._clock()
        if every_s is None:
            return False
        is_late = now - self._last_s >= every_s
        if self._topology is not None:
            is_late = bool(self._topology.max(int(is_late and self._topology.is_main)))
        if is_late:
            self._last_s = now
        return is_late
