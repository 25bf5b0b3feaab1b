"""Directories that a trainer has had filled from its store of versions: nothing is copied there.

SGLang brings a directory on the engine's own disk up to a version of a store, and is told to load that
directory afterwards. Here servers read the store itself while they serve, so it is enough to know which
version the directory stands for.
"""

from __future__ import annotations

from pathlib import Path

from headway.contracts.checkpoint_store import INDEX_NAME, version_name
from headway.dialects.error_shapes import InvalidField
from headway.dialects.sglang.types import PullBody
from headway.runtime.object_stores import is_url

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
        """Let a directory stand for a version; return where that is.

        Raises:
            InvalidField: the store is seen here, and has no complete version of this number.
        """
        place = self._start
        if body.target_version:
            place = f"{body.source_dir.rstrip('/')}/{version_name(body.target_version)}"
        if body.target_version and not is_url(place):
            folder = Path(place)
            if folder.parent.is_dir() and not (folder / INDEX_NAME).is_file():
                raise InvalidField(
                    f"{folder} has no {INDEX_NAME}, so version {body.target_version} is not complete; "
                    "pull it once it is",
                    "target_version",
                )
            place = str(folder)
        self._places.pop(body.local_checkpoint_dir, None)
        while len(self._places) >= MAX_DIRECTORIES:
            del self._places[next(iter(self._places))]
        self._places[body.local_checkpoint_dir] = place
        return place

    def place_of(self, directory: str) -> str:
        """Return where the weights are that a directory stands for."""
        return self._places.get(directory, directory)
