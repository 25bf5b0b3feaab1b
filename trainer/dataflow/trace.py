"""Trace of the calls' times, as a file that trace viewers open (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TRACE_NAME = "trace.json"
"""File name in the run folder."""


class Trace:
    """The calls of the first steps of a process, as complete events of the Trace Event Format."""

    def __init__(self, path: Path | None, num_steps: int) -> None:
        """
        Args:
            path: is replaced after each step; None writes nothing.
            num_steps: number of steps that are recorded.
        """
        self._path = path
        self._steps_left = num_steps if path is not None else 0
        self._events: list[dict[str, Any]] = []
        self._tracks: dict[int, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, category: str, **details: Any) -> Iterator[None]:
        """Record the enclosed block as an event, even if it fails."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            if self._steps_left:
                self._note(name, category, begin, time.perf_counter_ns(), details)

    def end_step(self) -> None:
        """Write what was noted so far."""
        if self._steps_left == 0 or self._path is None:
            return
        self._steps_left -= 1
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._path.with_suffix(".part")
        whole.write_text(json.dumps({"traceEvents": self._events}))
        whole.replace(self._path)

    def _note(
        self, name: str, category: str, begin: int, end: int, details: dict[str, Any]
    ) -> None:
        with self._lock:
            track = self._tracks.setdefault(threading.get_ident(), len(self._tracks))
            event = {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": begin / 1000,  # microseconds
                "dur": (end - begin) / 1000,
                "pid": os.getpid(),
                "tid": track,
                "args": details,
            }
            self._events.append(event)
