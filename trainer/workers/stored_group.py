"""A model that runs in a group of workers, as checkpoints know models."""

from __future__ import annotations

from concurrent.futures import Future

from trainer.api import SaveLoadMeta
from trainer.backends.state_writer import completed
from trainer.workers.group import WorkerGroup


class StoredGroup:
    """Saves and loads the model of a group; a save is complete when it returns."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def save(self, meta: SaveLoadMeta) -> Future[None]:
        """Store it in a folder that all workers share; for a checkpoint, or in Hugging Face form."""
        if meta.weight_format == "hf":
            self._group.export_model(meta.path)
        else:
            self._group.save_checkpoint(meta.path)
        return completed()

    def load(self, meta: SaveLoadMeta) -> None:
        """Restore what `save` stored."""
        self._group.load_checkpoint(meta.path)
