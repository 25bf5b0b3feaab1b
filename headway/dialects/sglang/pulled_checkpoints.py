"""Directories that a trainer has had filled from its store of versions: nothing is copied there.

SGLang brings a directory on the engine's own disk up to a version of a store, and is told to load that
directory afterwards. Here servers read the store itself while they serve, so it is enough to know which
version the directory stands for.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from headway.dialects.sglang.types import PullBody

MAX_DIRECTORIES = 64


class PulledCheckpoints:
    """Directory -> the version of a store for which it stands."""

    def __init__(self, start: str) -> None:
        """
        Args:
            start: directory of the weights before any version.
        """
        self._start = start
        self._places: dict[str, str] = {}

    def pull(self, body: PullBody) -> str:
        """Let a directory stand for a version; return where that is."""
        name = f"weight_v{body.target_version:06d}"
        place = str(PurePosixPath(body.source_dir) / name) if body.target_version else self._start
        self._places.pop(body.local_checkpoint_dir, None)
        while len(self._places) >= MAX_DIRECTORIES:
            del self._places[next(iter(self._places))]
        self._places[body.local_checkpoint_dir] = place
        return place

    def place_of(self, directory: str) -> str:
        """Return where the weights are that a directory stands for."""
        return self._places.get(directory, directory)
