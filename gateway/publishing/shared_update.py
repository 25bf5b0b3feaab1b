"""One publication that several requests may wait for.

A publisher that is killed closes its connection, one whose gateway or network stumbled sends its
request again. So an update without a waiting caller goes on for a moment, and is then given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from headway.contracts.errors import ServiceError, SyncError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta

log = logging.getLogger(__name__)


class SharedUpdate:
    """Runs from its construction on; cancelling who waits does not end it."""

    def __init__(
        self, meta: WeightUpdateMeta, work: Coroutine[Any, Any, PolicyVersion], abandon_s: float
    ) -> None:
        """Args:
        meta: what is published.
        work: ends in the version that serves; cancelled when it is given up.
        abandon_s: seconds that it goes on without a waiting caller.
        """
        self.meta = meta
        self._abandon_s = abandon_s
        self._task = asyncio.create_task(work, name=f"publish version {meta.version}")
        self._task.add_done_callback(_log_failure)
        self._num_waiting = 0
        self._abandon: asyncio.TimerHandle | None = None
        self._reason: ServiceError | None = None

    @property
    def is_done(self) -> bool:
        """It was committed, or failed."""
        return self._task.done()

    async def wait(self) -> PolicyVersion:
        """The version that serves in the end.

        Raises:
            ServiceError: why it failed, or the error given to `end`.
        """
        self._num_waiting += 1
        if self._abandon is not None:
            self._abandon.cancel()
        try:
            await self.until_done()
        finally:
            self._num_waiting -= 1
            if not (self._num_waiting or self.is_done):
                loop = asyncio.get_running_loop()
                self._abandon = loop.call_later(self._abandon_s, self._give_up)
        if self._task.cancelled() and self._reason is not None:
            raise self._reason
        return self._task.result()

    async def until_done(self) -> None:
        """Wait, whatever comes of it."""
        await asyncio.wait({self._task})

    async def end(self, reason: ServiceError) -> None:
        """Give it up, if it is not too late, and wait until it has ended."""
        if not self.is_done:
            self._reason = reason
            self._task.cancel()
        await self.until_done()

    def _give_up(self) -> None:
        self._reason = SyncError(
            f"nobody has waited for version {self.meta.version} for {self._abandon_s:g} s: its "
            "publisher is gone"
        )
        self._task.cancel()


def _log_failure(task: asyncio.Task[PolicyVersion]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("update failed", extra={"task": task.get_name(), "reason": str(error)})
