"""Claims queued rollouts within capacity and plays them; every claimed rollout ends exactly once.

One loop claims (`_claim`), one task plays each rollout (`_play`). The claim loop sleeps on
`changed`, which is raised by submissions, finished rollouts, new versions and a new consumer. A
rollout whose server failed goes back to the queue; whatever else it raises is recorded as a failure
and spends the error budget. Closing cancels what is in play and puts it back. `_claim_lock` is held
from reading the limits until the rollout has its task, so that `unbound` sees every rollout in play.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.errors import BackendError, ErrorBudgetExceeded, ServiceError
from headway.contracts.types import RolloutRequest, TrajectoryGroup
from headway.rollout.ledger.base import Lease, LeaseLimits, Ledger
from headway.runtime.staleness import StalenessController

log = logging.getLogger(__name__)

Play = Callable[[RolloutRequest], Awaitable[TrajectoryGroup]]


class Signal:
    """Wakes everyone who took `event()` before the last `notify()`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def event(self) -> asyncio.Event:
        """Take this before looking at the state, wait on it after."""
        return self._event

    def notify(self) -> None:
        """The state changed."""
        self._event.set()
        self._event = asyncio.Event()


class Executor:
    """Bounded concurrency over the ledger's queue."""

    def __init__(
        self, ledger: Ledger, staleness: StalenessController, play: Play, config: ExecutorConfig
    ) -> None:
        self._ledger = ledger
        self._staleness = staleness
        self._play = play
        self._config = config
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._consumer: str | None = None
        self._claiming: asyncio.Task[None] | None = None
        self._claim_lock = asyncio.Lock()
        self._outcomes: deque[str | None] = deque(maxlen=config.error_window)
        self.changed = Signal()

    def start(self) -> None:
        """Begin to claim."""
        self._claiming = asyncio.create_task(self._claim(), name="claim rollouts")

    async def stop_claiming(self) -> None:
        """Claim no more; what is in play may end."""
        if self._claiming is not None:
            self._claiming.cancel()
            await asyncio.gather(self._claiming, return_exceptions=True)

    async def aclose(self) -> None:
        """Cancel what is in play; it goes back to the queue."""
        await self.stop_claiming()
        await self._stop(list(self._tasks))

    @property
    def last_failures(self) -> list[str]:
        """Reasons of the failures within the window, oldest first."""
        return [reason for reason in self._outcomes if reason is not None]

    def check_budget(self) -> None:
        """Raise once more rollouts failed within the window than the budget tolerates.

        Raises:
            ErrorBudgetExceeded: with the last reasons.
        """
        failures = self.last_failures
        if len(failures) > self._config.error_budget:
            raise ErrorBudgetExceeded(
                f"{len(failures)} of the last {len(self._outcomes)} rollouts failed, "
                f"executor.error_budget={self._config.error_budget}; latest: {failures[-1]}"
            )

    def bind(self, consumer: str) -> None:
        """The consumer whose rollouts are bounded, also those in play; it starts with a full budget."""
        self._consumer = consumer
        for task, owner in self._tasks.items():
            if owner == consumer:
                self._staleness.mark_bounded(task.get_name())
        self._outcomes.clear()
        self.changed.notify()

    @asynccontextmanager
    async def unbound(self) -> AsyncIterator[None]:
        """Put the consumer's rollouts back; none is claimed until the block ends."""
        async with self._claim_lock:
            consumer, self._consumer = self._consumer, None
            await self._stop([task for task, owner in self._tasks.items() if owner == consumer])
            yield

    async def _stop(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _claim(self) -> None:
        while True:
            changed = self.changed.event()
            async with self._claim_lock:
                is_claimed = await self._claim_one()
            if not is_claimed:
                await changed.wait()

    async def _claim_one(self) -> bool:
        limits = LeaseLimits(self._consumer, self._staleness.capacity(), self._staleness.free())
        if limits.free <= 0:
            return False
        lease = await self._ledger.lease(limits, self._staleness.version)
        if lease is None:
            return False
        request = lease.request
        is_bounded = request.consumer == self._consumer
        self._staleness.start(lease.key, request.prompt.group_size, is_bounded)
        task = asyncio.create_task(self._run(lease), name=lease.key)
        self._tasks[task] = request.consumer
        task.add_done_callback(self._tasks.pop)
        # A task that is cancelled before its first step never runs, and would leave the lease behind.
        await asyncio.sleep(0)
        return True

    async def _run(self, lease: Lease) -> None:
        rollout_id = lease.request.rollout_id
        try:
            async with asyncio.timeout(self._config.rollout_timeout_s):
                group = await self._play(lease.request)
            await self._ledger.complete(group)
        except asyncio.CancelledError:
            await self._ledger.requeue(rollout_id, "its play was cancelled")
            self._staleness.release(lease.key)
            raise
        except BackendError as error:
            await self._retry_or_fail(lease, error)
        except TimeoutError:
            await self._fail(lease, f"still in play after {self._config.rollout_timeout_s:g} s")
        except ServiceError as error:
            await self._fail(lease, f"{type(error).__name__}: {error}")
        except Exception as error:
            log.warning("workflow raised", exc_info=error, extra={"rollout_id": rollout_id})
            await self._fail(lease, f"workflow raised {type(error).__name__}: {error}")
        else:
            self._staleness.accept(lease.key)
            self._outcomes.append(None)
        self.changed.notify()

    async def _retry_or_fail(self, lease: Lease, error: BackendError) -> None:
        rollout_id = lease.request.rollout_id
        if lease.attempt >= self._config.max_attempts:
            await self._fail(lease, f"{lease.attempt} attempts; last: {error}")
            return
        log.info(
            "rollout goes back to the queue", extra={"rollout_id": rollout_id, "reason": str(error)}
        )
        # Queued before its capacity returns: no younger rollout may take its place in the order.
        await self._ledger.requeue(rollout_id, str(error))
        self._staleness.release(lease.key)

    async def _fail(self, lease: Lease, reason: str) -> None:
        rollout_id = lease.request.rollout_id
        log.warning("rollout failed", extra={"rollout_id": rollout_id, "reason": reason})
        self._staleness.release(lease.key)
        self._outcomes.append(reason)
        await self._ledger.fail(rollout_id, reason)
