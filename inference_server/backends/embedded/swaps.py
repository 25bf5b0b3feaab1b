"""A swap that waits for its turn, and what it replaced, freed beside the engine: that takes as long as
copying it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from headway.contracts.config.server import UpdatePolicy
from inference_server.backends.embedded.model import PreparedVersion

FREE_BYTES = 16 << 20
FREE_INTERVAL_S = 0.005


@dataclass
class Swap:
    """One version, and what becomes of the requests that run."""

    staged: PreparedVersion
    policy: UpdatePolicy
    done: Future[int] = field(default_factory=Future)
    """Gives the number of sequences that had started."""
    replaced: list[Tensor] = field(default_factory=list)


class ReplacedWeights:
    """Replaced weights that are being freed, of one version at most."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def free(self, tensors: list[Tensor]) -> None:
        """Free tensors that nothing else holds; empties the list in time."""
        self._thread = threading.Thread(
            target=let_go, args=(tensors,), name="free weights", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last ones are freed."""
        if self._thread is not None:
            self._thread.join()


def let_go(tensors: list[Tensor]) -> None:
    """Free tensors a few at a time: giving back memory delays threads that allocate, as decoding does."""
    freed = 0
    while tensors:
        freed += tensors.pop().nbytes
        if freed >= FREE_BYTES:
            time.sleep(FREE_INTERVAL_S)
            freed = 0
