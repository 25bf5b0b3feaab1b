"""A `WeightReceiver` over versions that a test holds: it counts, and can be held up."""

from __future__ import annotations

import threading

import torch

from headway.contracts.errors import SyncError
from weight_sync.channel import StagedWeights
from weight_sync.deadline import Deadline
from weight_sync.manifest import TensorEntry, content_digest, tensor_checksum

DEADLINE_S = 10.0


class PeerReceiver:
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

    def within(self, deadline: Deadline) -> PeerReader:
        return PeerReader(self, deadline)

    def keep(self, staged) -> None:
        self.kept = [*self.kept, staged][-1:]

    def held(self, version):
        return next((each for each in self.kept if each.version == version), None)

    def close(self) -> None:
        self.is_closed = True


class PeerReader:
    """Reads as soon as the versions may be read, or its deadline passes."""

    def __init__(self, peer_store: PeerReceiver, deadline: Deadline) -> None:
        self._peer_store = peer_store
        self._deadline = deadline

    def stage(self, meta, expected):
        peer_store = self._peer_store
        peer_store.inside += 1
        peer_store.most_inside = max(peer_store.most_inside, peer_store.inside)
        peer_store.entered.set()
        try:
            while not peer_store.may_go.is_set():
                self._deadline.pause()
        finally:
            peer_store.inside -= 1
        if meta.version in peer_store.torn:
            raise SyncError(f"version {meta.version} is torn")
        peer_store.staged.append(meta.version)
        peer_store.paths.append(meta.path)
        return make_staged(meta.version)


def make_staged(version: int) -> StagedWeights:
    """A version of one tensor, as a receiver proves it."""
    tensor = torch.full((4,), float(version))
    entry = TensorEntry(
        name="w", shape=(4,), dtype="float32", checksum=tensor_checksum(tensor), blob="b", size=16
    )
    return StagedWeights(version, content_digest(version, [entry]), {"w": tensor}, (entry,))
