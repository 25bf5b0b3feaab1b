"""Claims queued rollouts within capacity and plays them; every claimed rollout ends exactly once.

One loop claims (`_claim`), one task plays each rollout (`_run`), one loop renews the leases and has the
ledger requeue those of gateways that are gone (`_keep_leases`). The claim loop sleeps on `changed`,
which is raised by submissions, finished rollouts, new versions and a new consumer. A rollout whose
server failed goes back to the queue; whatever else it raises is recorded as a failure and spends the
error budget. Closing cancels what is in play and puts it back. `_claim_lock` is held from reading the
limits until the rollouts have their tasks, so that `unbound` sees every rollout in play.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVarTuple

from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.errors import (
    BackendError,
    ErrorBudgetExceeded,
    Fenced,
    RewardOutage,
    ServiceError,
    StateError,
    VersionMoved,
)
from headway.contracts.types import RolloutRequest, TrajectoryGroup
from headway.rollout.ledger.base import Admission, Lease, Ledger
from headway.rollout.signal import Signal

log = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")
OUTAGE_PAUSE_S = 0.5
"""Before a ledger that did not answer is asked again."""


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a rollout."""

    group: TrajectoryGroup
    dropped_because: str | None = None
    """Why its filter dropped it; None keeps it."""


Play = Callable[[RolloutRequest], Awaitable[Played]]
Admit = Callable[[int], Admission]
"""Room of this gateway -> what may start."""


class Executor:
    """Bounded concurrency over the ledger's queue."""

    def __init__(
        self,
        ledger: Ledger,
        play: Play,
        admit: Admit,
        limit: Callable[[], int],
        config: ExecutorConfig,
        changed: Signal,
    ) -> None:
        """Args:
        ledger: where the queue is.
        play: from request to result; what it raises is the outcome, too.
        admit: what the staleness bound allows now.
        limit: trajectories in play at once, at most; read anew for every claim.
        config: bounds and budgets.
        changed: wakes the claim loop; raised here whenever a rollout ends.
        """
        self._ledger = ledger
        self._play = play
        self._admit = admit
        self._limit = limit
        self._config = config
        self._tasks: dict[asyncio.Task[bool], Lease] = {}
        self._in_play: dict[str, int] = {}
        """Trajectories by lease, until the play is over; the ledger may hear of it later."""
        self._running = 0
        self.num_left = 0
        """Plays that were over, each told by one notification of `changed`."""
        self.num_kept = 0
        """Rollouts that ended with a result, each told by one notification of `changed`."""
        self._reporting: set[str] = set()
        """Leases whose outcome the ledger is being told: it may have ended them already."""
        self._loops: list[asyncio.Task[None]] = []
        self._claim_lock = asyncio.Lock()
        self._outcomes: dict[bool, deque[str | None]] = {
            is_attached: deque(maxlen=config.error_window) for is_attached in (True, False)
        }
        """Of the attached consumer and of all others: none of them spends the other's budget."""
        self._changed = changed

    def start(self) -> None:
        """Begin to claim."""
        self._loops = [
            asyncio.create_task(self._claim(), name="claim rollouts"),
            asyncio.create_task(self._keep_leases(), name="keep leases"),
        ]

    async def stop_claiming(self) -> None:
        """Claim no more; what is in play may end."""
        if self._loops:
            await _end(self._loops[:1])

    async def aclose(self) -> None:
        """Cancel what is in play; it goes back to the queue."""
        await self.stop_claiming()
        await _end(list(self._tasks))
        await _end(self._loops)

    @property
    def running(self) -> int:
        """Trajectories in play here, whoever waits for them."""
        return self._running

    @property
    def free(self) -> int:
        """Trajectories that this gateway has room for."""
        return self._limit() - self._running

    @property
    def last_failures(self) -> list[str]:
        """Reasons of the failures within the window, those of the attached consumer last."""
        return [*_failures(self._outcomes[False]), *_failures(self._outcomes[True])]

    def check_budget(self, consumer: str) -> None:
        """Raise once more rollouts failed within the window than the budget tolerates.

        Those of the attached consumer have a budget of their own, and all others share one.

        Raises:
            ErrorBudgetExceeded: with the last reasons.
        """
        outcomes = self._outcomes_with(consumer)
        failures = _failures(outcomes)
        if len(failures) > self._config.error_budget:
            raise ErrorBudgetExceeded(
                f"{len(failures)} of the last {len(outcomes)} rollouts failed, "
                f"executor.error_budget={self._config.error_budget}; latest: {failures[-1]}"
            )

    def forgive(self) -> None:
        """A consumer starts with a full budget."""
        for outcomes in self._outcomes.values():
            outcomes.clear()
        self._changed.notify()

    def _outcomes_with(self, consumer: str) -> deque[str | None]:
        return self._outcomes[consumer == self._admit(0).consumer]

    @asynccontextmanager
    async def unbound(self, consumer: str) -> AsyncIterator[None]:
        """Put a consumer's rollouts back; none is claimed until the block ends."""
        async with self._claim_lock:
            await self.stop(lambda lease: lease.request.consumer == consumer)
            yield

    async def stop(self, is_meant: Callable[[Lease], bool]) -> None:
        """Cancel what is in play of these; what is this gateway's still goes back to the queue."""
        await _end([task for task, lease in self._tasks.items() if is_meant(lease)])

    async def _claim(self) -> None:
        while True:
            changed = self._changed.event()
            try:
                async with self._claim_lock:
                    is_claimed = await self._claim_some()
            except StateError as error:
                log.warning("the ledger does not answer", extra={"reason": str(error)})
                await asyncio.sleep(OUTAGE_PAUSE_S)
                continue
            if not is_claimed:
                await changed.wait()

    async def _claim_some(self) -> bool:
        if self.free <= 0:
            return False
        leases = await self._ledger.lease(self._admit(self.free))
        for lease in leases:
            self._in_play[lease.key] = lease.request.prompt.group_size
            self._running += lease.request.prompt.group_size
            task = asyncio.create_task(self._run(lease), name=lease.key)
            self._tasks[task] = lease
            task.add_done_callback(self._forget)
        if leases:
            # A task that is cancelled before its first step never runs, and leaves the lease behind.
            await asyncio.sleep(0)
        return bool(leases)

    def _forget(self, task: asyncio.Task[bool]) -> None:
        lease = self._tasks.pop(task)
        if task.cancelled():
            pass
        elif (error := task.exception()) is not None:  # its lease ends, and it is played again
            extra = {"rollout_id": lease.rollout_id}
            log.error("the end of a rollout was not recorded", exc_info=error, extra=extra)
        else:
            self.num_kept += task.result()
        self._reporting.discard(lease.key)
        self._leave(lease)
        self._changed.notify()

    def _leave(self, lease: Lease) -> None:
        """Its play is over: the next one may begin while the ledger is told."""
        size = self._in_play.pop(lease.key, 0)
        if size:
            self._running -= size
            self.num_left += 1
            self._changed.notify()

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / 4)
            try:
                lost = await self._ledger.renew([lease.key for lease in self._tasks.values()])
                lost -= self._reporting
                lost &= {lease.key for lease in self._tasks.values()}
                if lost:
                    log.warning("leases were lost", extra={"leases": sorted(lost)[:8]})
                    await self.stop(partial(_is_among, lost))
                await self._ledger.expire()
                self._changed.notify()  # also for what a tool has put back into the queue
            except StateError as error:
                log.warning("leases could not be renewed", extra={"reason": str(error)})

    async def _run(self, lease: Lease) -> bool:
        """Whether it ended with a result that is kept."""
        with suppress(Fenced):  # its lease is another's by now: who has it reports
            try:
                return await self._finish(lease, await self._play_in_time(lease))
            except asyncio.CancelledError:
                await self._report(self._ledger.requeue, lease, "its play was cancelled")
                raise
            except (BackendError, RewardOutage, VersionMoved) as error:
                await self._retry_or_fail(lease, error)
            except TimeoutError as error:
                await self._fail(lease, str(error))
            except ServiceError as error:
                await self._fail(lease, f"{type(error).__name__}: {error}")
            except Exception as error:
                extra = {"rollout_id": lease.rollout_id}
                log.warning("workflow raised", exc_info=error, extra=extra)
                await self._fail(lease, f"workflow raised {type(error).__name__}: {error}")
        return False

    async def _play_in_time(self, lease: Lease) -> Played:
        limit_s, whose = self._config.rollout_timeout_s, "still in play"
        if lease.request.timeout_s is not None:
            left_s = lease.request.timeout_s - lease.age_s
            if left_s < limit_s:
                limit_s, whose = left_s, f"its timeout_s={lease.request.timeout_s:g} is over"
        try:
            async with asyncio.timeout(limit_s) as deadline:
                return await self._play(lease.request)
        except TimeoutError as error:
            if not deadline.expired():  # the workflow's own
                raise RuntimeError(f"TimeoutError: {error}") from error
            raise TimeoutError(f"{whose} after {max(0.0, limit_s):g} s") from None
        finally:
            self._leave(lease)

    async def _finish(self, lease: Lease, played: Played) -> bool:
        if played.dropped_because is None:
            await self._report(self._ledger.complete, lease, played.group)
        else:
            reason, mean = played.dropped_because, played.group.mean_reward
            await self._report(self._ledger.drop_filtered, lease, reason, mean)
        self._outcomes_with(lease.request.consumer).append(None)
        return played.dropped_because is None

    async def _retry_or_fail(self, lease: Lease, error: ServiceError) -> None:
        if lease.attempt >= self._config.max_attempts:
            await self._fail(lease, f"{lease.attempt} attempts; last: {error}")
            return
        log.info(
            "rollout goes back to the queue",
            extra={"rollout_id": lease.rollout_id, "reason": str(error)},
        )
        await self._report(self._ledger.requeue, lease, str(error))

    async def _fail(self, lease: Lease, reason: str) -> None:
        extra = {"rollout_id": lease.rollout_id, "reason": reason}
        log.warning("rollout failed", extra=extra)
        self._outcomes_with(lease.request.consumer).append(reason)
        await self._report(self._ledger.fail, lease, reason)

    async def _report(
        self, report: Callable[[Lease, *Ts], Awaitable[None]], lease: Lease, *args: *Ts
    ) -> None:
        """Tell the ledger what came of a lease, however long it does not answer."""
        self._reporting.add(lease.key)
        while True:
            try:
                return await report(lease, *args)
            except StateError as error:
                extra = {"rollout_id": lease.rollout_id, "reason": str(error)}
                log.warning("the ledger does not answer", extra=extra)
                await asyncio.sleep(OUTAGE_PAUSE_S)


def _failures(outcomes: Iterable[str | None]) -> list[str]:
    return [reason for reason in outcomes if reason is not None]


def _is_among(keys: set[str], lease: Lease) -> bool:
    return lease.key in keys


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
