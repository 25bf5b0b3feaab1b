"""Health of a server that answers heartbeats: whether it also answers requests."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DOUBLINGS = 4
"""A quarantine lasts at most 16 times `quarantine_s`."""


@dataclass(slots=True)
class Health:
    """Counts failures in a row; enough of them are a quarantine, after which one request tries.

    Times are of one clock that never goes back.
    """

    max_failures: int
    quarantine_s: float
    until: float | None = None
    """Time when the quarantine ends; None while there is none."""
    reason: str = ""
    """Why the last quarantine began."""
    _num_failures: int = 0
    _num_quarantines: int = 0
    """Number of quarantines in a row."""
    _is_tried: bool = False
    """True while a request is on its way whose result decides."""

    @property
    def is_quarantined(self) -> bool:
        """True until a request has succeeded again."""
        return self.until is not None

    def admits(self, now: float) -> bool:
        """True if a request may be sent: any while the server is healthy, one after the
        quarantine."""
        return self.until is None or (now >= self.until and not self._is_tried)

    def begin(self) -> bool:
        """A request is sent; whether it is the trial after a quarantine."""
        self._is_tried |= self.is_quarantined
        return self.is_quarantined

    def end_trial(self) -> None:
        """The trial ended, with a verdict or without."""
        self._is_tried = False

    def succeed(self) -> None:
        """A request was answered."""
        self._num_failures = self._num_quarantines = 0
        self.until = None

    def fail(
        self, now: float, is_trial: bool = False, at_once: bool = False, reason: str = ""
    ) -> bool:
        """A request failed by the server's fault; whether a quarantine begins by that.

        Args:
            at_once: one such failure is enough.
        """
        self._num_failures += 1
        is_well = self.until is None
        if is_well and self._num_failures < self.max_failures and not at_once:
            return False
        if not is_well and not is_trial:
            return False  # it was sent before the quarantine
        doublings = min(self._num_quarantines, MAX_DOUBLINGS)
        self.until = now + self.quarantine_s * 2.0**doublings
        self._num_quarantines += 1
        self.reason = reason
        return True
