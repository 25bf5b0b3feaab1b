"""Profiles of a worker's process, as Chrome traces."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class WorkerProfiler:
    """One profile at a time; the calls of workers are named in it."""

    def __init__(self) -> None:
        self._running: profile | None = None

    def start(self) -> None:
        """Begin a profile."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(activities=activities)
        self._running.start()

    def stop(self, file: Path) -> None:
        """End the profile that was begun, and write it; without one nothing is written."""
        if self._running is None:
            return
        self._running.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(file))
        self._running = None
