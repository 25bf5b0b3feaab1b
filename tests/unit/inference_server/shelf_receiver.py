"""A `WeightReceiver` over versions that a test puts on a shelf: it counts, and can be held up."""

from __future__ import annotations

import threading

import torch

from headway.contracts.errors import SyncError
from weight_sync.channel import StagedWeights
from weight_sync.manifest import TensorEntry, content_digest, tensor_checksum
from weight_sync.patience import Patience

PATIENCE_S = 10.0


class ShelfReceiver:
    """Every version is there, with one tensor that holds its number."""

    def __init__(self) -> None:
        self.torn: set[int] = set()
        self.staged: list[int] = []
        self.paths: list[str] = []
        self.entered = threading.Event()
        self.may_go = threading.Event()
        self.may_go.set()
        self.inside = 0
        self.most_inside = 0
        self.kept: list[StagedWeights] = []
        self.is_closed = False

    def within(self, patience: Patience) -> ShelfReader:
        return ShelfReader(self, patience)

    def keep(self, staged) -> None:
        self.kept = [*self.kept, staged][-1:]

    def held(self, version):
        return next((each for each in self.kept if each.version == version), None)

    def close(self) -> None:
        self.is_closed = True


class ShelfReader:
    """Reads as soon as the shelf may be read, or its patience ends."""

    def __init__(self, shelf: ShelfReceiver, patience: Patience) -> None:
        self._shelf = shelf
        self._patience = patience

    def stage(self, meta, expected):
        shelf = self._shelf
        shelf.inside += 1
        shelf.most_inside = max(shelf.most_inside, shelf.inside)
        shelf.entered.set()
        try:
            while not shelf.may_go.is_set():
                self._patience.pause()
        finally:
            shelf.inside -= 1
        if meta.version in shelf.torn:
            raise SyncError(f"version {meta.version} is torn")
        shelf.staged.append(meta.version)
        shelf.paths.append(meta.path)
        return make_staged(meta.version)


def make_staged(version: int) -> StagedWeights:
    """A version of one tensor, as a receiver proves it."""
    tensor = torch.full((4,), float(version))
    entry = TensorEntry(
        name="w", shape=(4,), dtype="float32", checksum=tensor_checksum(tensor), blob="b", size=16
    )
    return StagedWeights(version, content_digest(version, [entry]), {"w": tensor}, (entry,))
