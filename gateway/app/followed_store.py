"""A directory in which somebody else's trainer leaves versions: each is published when it is complete.

    weight_v000001/     a Hugging Face directory, or what changed since another one
    latest              optional: name of the version that is to serve, also below a directory of its run

See `weight_sync.checkpoint_deltas`, with which the servers read it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from gateway.app.foreign_weights import ForeignWeights
from gateway.publishing.updates import WeightUpdates
from headway.contracts.config.gateway import FollowConfig
from headway.contracts.errors import DataError, ServiceError

log = logging.getLogger(__name__)

PREFIX = "weight_v"
POINTER = "latest"
INDEX = "model.safetensors.index.json"
"""A trainer writes it last."""
MAX_POINTER_CHARS = 512


class FollowedStore:
    """Publishes the newest version, and again what failed until it is mended or a newer one is there."""

    def __init__(
        self, config: FollowConfig, weights: ForeignWeights, updates: WeightUpdates
    ) -> None:
        self._root = Path(config.path).resolve()
        self._interval_s = config.interval_s
        self._weights = weights
        self._updates = updates
        self._failure: str | None = None

    async def run(self) -> None:
        """Look again and again; ends when it is cancelled."""
        while True:
            try:
                await self.look()
            except (ServiceError, OSError) as error:
                if str(error) != self._failure:  # said once
                    log.warning(
                        "not published", extra={"store": str(self._root), "why": str(error)}
                    )
                self._failure = str(error)
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """Publish the newest version, unless it is the last one that was published.

        Raises:
            ServiceError: it was refused; the old one serves on.
        """
        folder = await asyncio.to_thread(newest_version, self._root)
        if folder is None or self._weights.newest_path == str(folder):
            return
        label = str(int(folder.name.removeprefix(PREFIX)))
        await self._weights.publish(self._updates, str(folder), label, aborts=False)
        self._failure = None


def newest_version(root: Path) -> Path | None:
    """Return the directory of the version that is to serve; None while there is none.

    It is what `latest` names, else the complete one with the highest number.

    Raises:
        DataError: `latest` names no version.
    """
    pointer = root / POINTER
    if pointer.is_file():
        with pointer.open() as file:
            text = file.read(MAX_POINTER_CHARS).strip()
        run, _, name = text.rpartition("/")
        number = name.removeprefix(PREFIX)
        parts = run.split("/")
        if not _is_number(number) or run.startswith("/") or ".." in parts:
            raise DataError(f"{pointer} holds {text[:80]!r}; wanted is a name like weight_v000007")
        folder = root / run / f"{PREFIX}{int(number):06d}"
        return folder if folder.is_dir() else None
    complete = {
        int(each.name.removeprefix(PREFIX)): each
        for each in root.glob(f"{PREFIX}*")
        if _is_number(each.name.removeprefix(PREFIX)) and (each / INDEX).is_file()
    }
    return complete[max(complete)] if complete else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18
