"""How much memory tensors hold, by counting: what torch allocates on this thread while it is watched."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Bytes of the storages that were made while it was on and are still held, and the most at once."""

    def __init__(self, *known: Tensor) -> None:
        """
        Args:
            known: whose memory was there before.
        """
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    @property
    def bytes_held(self) -> int:
        """Now."""
        for key, (storage, _) in list(self._live.items()):
            if storage.expired():
                del self._live[key]
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it does with its shards comes here again
        result = func(*args, **(kwargs or {}))
        made = self.bytes_held
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and not leaf.is_meta:
                made += self._note(getattr(leaf, "elem", leaf))
        self.peak_bytes = max(self.peak_bytes, made)
        return result

    def _note(self, tensor: Tensor) -> int:
        """Bytes, if its storage is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._live:
            return 0
        self._live[key] = (StorageWeakRef(storage), storage.nbytes())
        return storage.nbytes()
