"""Memory that a process will hold on its device at once, added up before it holds any of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.contracts.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one process on one device, by what they are for."""

    needed: Mapping[str, int]
    """Bytes that it holds for certain, sooner or later all at once."""
    wanted: Mapping[str, int]
    """Bytes that it holds at most, by the settings; with fewer it is slower."""

    @property
    def needed_bytes(self) -> int:
        """Sum of `needed`."""
        return sum(self.needed.values())

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return self.needed_bytes + sum(self.wanted.values())

    def describe(self, free_bytes: int) -> str:
        """One line: every part, the sum, and what the device has free."""
        parts = {**self.needed, **self.wanted}
        each = " + ".join(f"{name} {gibibytes(size)}" for name, size in parts.items() if size)
        return (
            f"{each} = {gibibytes(self.total_bytes)} of {gibibytes(free_bytes)} GiB that are free"
        )

    def check(self, device: str, free_bytes: int, advice: str) -> str:
        """Return the line to log.

        Args:
            device: its name in the message.
            free_bytes: that the process may take, by the driver.
            advice: what to change if it does not fit.
        Raises:
            ConfigError: what it holds for certain does not fit.
        """
        line = f"memory of {device}: {self.describe(free_bytes)}"
        if self.needed_bytes > free_bytes:
            raise ConfigError(
                f"{line}; {gibibytes(self.needed_bytes)} GiB are needed at once and do not fit: {advice}"
            )
        if self.total_bytes > free_bytes:
            return f"{line}; it may run out at the bounds of its settings: {advice}"
        return line


def gibibytes(count: int) -> str:
    """Return bytes in GiB, with two digits behind the point."""
    return f"{count / GIB:.2f}"
