"""Metrics as JSON Lines, one object per step, flushed at once so that a display can follow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS_NAME = "metrics.jsonl"


class MetricsJournal:
    """Appends to a file; `None` as path writes nothing (ranks other than the first)."""

    def __init__(self, path: Path | None) -> None:
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.read_bytes() if path.is_file() else b""
            self._file = path.open("a")
            if before and not before.endswith(b"\n"):  # the last line of a killed process
                self._file.write("\n")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """One line."""
        if self._file is not None:
            self._file.write(json.dumps(metrics) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The last line of every step, in order; a step that a resumed run repeated counts once."""
    steps: dict[int, dict[str, Any]] = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                metrics = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a killed process
            steps[int(metrics["step"])] = metrics
    return [steps[step] for step in sorted(steps)]
