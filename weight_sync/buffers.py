"""Memory for weights that come in, used again when the version before has gone.

Fresh memory is three times slower to fill than memory that was touched before: the kernel has to find and
clear it. So what a former version leaves is kept, up to the most that was ever in use at once.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from headway.contracts.errors import SyncError

_Memory = NDArray[np.uint8]


class Buffers:
    """Lends memory until the last tensor in it is gone; any thread may take some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[_Memory] = deque()
        """Filled without the lock: garbage is collected anywhere, also below `take`."""
        self._free: list[_Memory] = []
        self._used_bytes = 0
        self._peak_bytes = 0

    def take(self, size: int) -> torch.Tensor:
        """[size] uint8 with any content.

        Raises:
            SyncError: there is no so much memory.
        """
        with self._lock:
            self._collect()
            memory = self._memory(size)
            self._used_bytes += size
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        lease = memory[:]  # held by every tensor in the memory, and by nothing else
        weakref.finalize(lease, self._returned.append, memory).atexit = False
        return torch.from_numpy(lease)

    def _collect(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._used_bytes -= memory.nbytes
            self._free.append(memory)

    def _memory(self, size: int) -> _Memory:
        for index, memory in enumerate(self._free):
            if memory.nbytes == size:
                return self._free.pop(index)
        free_bytes = sum(memory.nbytes for memory in self._free)
        while self._free and self._used_bytes + free_bytes + size > self._peak_bytes:
            free_bytes -= self._free.pop(0).nbytes
        try:
            return np.empty(size, np.uint8)  # numpy asks for huge pages, torch does not
        except (MemoryError, ValueError) as error:
            raise SyncError(f"no memory for {size} bytes of weights") from error
