"""Claims queued rollouts within capacity and runs them; every claimed rollout ends exactly once.

One loop claims (`_claim`), one task runs each rollout (`_run`), one loop renews the leases and has the
ledger requeue those of gateways that are gone (`_keep_leases`). The claim loop sleeps on `changed`,
which is raised by submissions, finished rollouts, new versions and a new consumer. A rollout whose
server failed goes back to the queue; whatever else it raises is recorded as a failure and spends its
consumer's error budget. Closing cancels what is running and puts it back. `_claim_lock` is held from
reading the limits until the rollouts have their tasks, so that `unbound` sees every running rollout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from gateway.execution.error_budgets import ErrorBudgets
from gateway.ledger.base import WorkQueue
from gateway.ledger.observer import Attempt, AttemptOutcome, LedgerObserver
from gateway.ledger.records import Capacity, Lease
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.errors import (
    BackendError,
    Fenced,
    RewardOutage,
    ServiceError,
    StateError,
    VersionMoved,
)
from headway.contracts.types import RolloutRequest, TrajectoryGroup
from headway.runtime.clock import running_clock
from headway.runtime.tasks import Signal, cancel_and_wait
from headway.runtime.user_frames import user_frames

log = logging.getLogger(__name__)

OUTAGE_PAUSE_S = 0.5
"""Before a ledger that did not answer is asked again."""


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """Result of one run of a rollout."""

    group: TrajectoryGroup
    dropped_because: str | None = None
    """Why its filter dropped it; None keeps it."""


RunRollout = Callable[[RolloutRequest], Awaitable[RolloutOutcome]]
Admit = Callable[[int], Capacity]
"""Room of this gateway -> what may start."""


class RolloutExecutor:
    """Bounded concurrency over the ledger's queue."""

    def __init__(
        self,
        ledger: WorkQueue,
        observer: LedgerObserver,
        run_rollout: RunRollout,
        admit: Admit,
        limit: Callable[[], int],
        config: ExecutorConfig,
        changed: Signal,
    ) -> None:
        """Args:
        ledger: where the queue is.
        observer: is called when attempts end.
        run_rollout: runs one, from request to result; what it raises is the outcome, too.
        admit: what the staleness bound allows now.
        limit: maximum number of trajectories at once; read for every claim.
        config: bounds and budgets.
        changed: wakes the claim loop; raised here whenever a rollout ends.
        """
        self._ledger = ledger
        self._observer = observer
        self._run_rollout = run_rollout
        self._admit = admit
        self._limit = limit
        self._config = config
        self._tasks: dict[asyncio.Task[bool], Lease] = {}
        self._in_play: dict[str, int] = {}
        """Running trajectories by lease, until the run is over; the ledger may be informed later."""
        self._leased_at: dict[str, float] = {}
        """Time of the lease by its key, on the event loop's clock."""
        self._running = 0
        self.num_left = 0
        """Number of runs that ended, each announced by one notification of `changed`."""
        self.num_kept = 0
        """Number of rollouts that ended with a result, each announced by a notification of `changed`."""
        self._reporting: set[str] = set()
        """Leases whose outcome is being reported to the ledger: it may have ended them already."""
        self._loops: list[asyncio.Task[None]] = []
        self._claim_lock = asyncio.Lock()
        self._budgets = ErrorBudgets(config)
        self._changed = changed
        self._now = running_clock()

    def start(self) -> None:
        """Begin to claim."""
        self._loops = [
            asyncio.create_task(self._claim(), name="claim rollouts"),
            asyncio.create_task(self._keep_leases(), name="keep leases"),
        ]

    async def stop_claiming(self) -> None:
        """Claim no more; running rollouts may end."""
        if self._loops:
            await cancel_and_wait(self._loops[:1])

    async def aclose(self) -> None:
        """Cancel running rollouts; they go back to the queue."""
        await self.stop_claiming()
        await cancel_and_wait(list(self._tasks))
        await cancel_and_wait(self._loops)

    @property
    def running(self) -> int:
        """Number of trajectories running here, for all consumers."""
        return self._running

    @property
    def free(self) -> int:
        """Trajectories that this gateway has room for."""
        return self._limit() - self._running

    @property
    def last_failures(self) -> list[str]:
        """Reasons of the failures that count against a budget, by consumer."""
        return self._budgets.last_failures

    def check_budget(self, consumer: str) -> None:
        """Raise once more of a consumer's rollouts failed than its budget tolerates.

        Raises:
            ErrorBudgetExceeded: with the last reason.
        """
        self._budgets.check(consumer)

    def reset_budget(self, consumer: str) -> None:
        """Let a consumer that attaches or leaves begin with a full budget."""
        self._budgets.reset(consumer)
        self._changed.notify()

    @asynccontextmanager
    async def unbound(self, consumer: str) -> AsyncIterator[None]:
        """Put a consumer's rollouts back; none is claimed until the block ends."""
        async with self._claim_lock:
            await self.stop(lambda lease: lease.request.consumer == consumer)
            yield

    async def stop(self, is_meant: Callable[[Lease], bool]) -> None:
        """Cancel these where they run; what this gateway still holds goes back to the queue."""
        await cancel_and_wait([task for task, lease in self._tasks.items() if is_meant(lease)])

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
        leased_at = self._now()
        for lease in leases:
            self._leased_at[lease.key] = leased_at
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
        elif (error := task.exception()) is not None:  # its lease ends, and it is run again
            extra = {"rollout_id": lease.rollout_id}
            log.error("the end of a rollout was not recorded", exc_info=error, extra=extra)
        else:
            self.num_kept += task.result()
        self._reporting.discard(lease.key)
        del self._leased_at[lease.key]
        self._leave(lease)
        self._changed.notify()

    def _leave(self, lease: Lease) -> None:
        """Count a run as over: the next one may begin while the ledger is informed."""
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
                if num_groups := await self._ledger.expire():
                    self._observer.expired(num_groups)
                self._changed.notify()  # also for what a tool has put back into the queue
            except StateError as error:
                log.warning("leases could not be renewed", extra={"reason": str(error)})

    async def _run(self, lease: Lease) -> bool:
        """Run a rollout; return True if it ended with a result that is kept."""
        with suppress(Fenced):  # its lease is another's by now: who has it reports
            try:
                return await self._finish(lease, await self._run_in_time(lease))
            except asyncio.CancelledError:
                await self._requeue(lease, "its run was cancelled")
                raise
            except (BackendError, RewardOutage, VersionMoved) as error:
                await self._retry_or_fail(lease, error)
            except TimeoutError as error:
                await self._fail(lease, str(error))
            except ServiceError as error:
                await self._fail(lease, f"{type(error).__name__}: {_full(error)}")
            except Exception as error:
                extra = {"rollout_id": lease.rollout_id}
                log.warning("workflow raised", exc_info=error, extra=extra)
                said = f"{type(error).__name__}: {_full(error)}\n{user_frames(error)}"
                await self._fail(lease, f"workflow raised {said}")
        return False

    async def _run_in_time(self, lease: Lease) -> RolloutOutcome:
        limit_s, whose = self._config.rollout_timeout_s, "still running"
        if lease.request.timeout_s is not None:
            left_s = lease.request.timeout_s - lease.age_s
            if left_s < limit_s:
                limit_s, whose = left_s, f"its timeout_s={lease.request.timeout_s:g} is over"
        try:
            async with asyncio.timeout(limit_s) as deadline:
                return await self._run_rollout(lease.request)
        except TimeoutError as error:
            if not deadline.expired():  # the workflow's own
                raise RuntimeError(f"TimeoutError: {error}") from error
            raise TimeoutError(f"{whose} after {max(0.0, limit_s):g} s") from None
        finally:
            self._leave(lease)

    async def _finish(self, lease: Lease, outcome: RolloutOutcome) -> bool:
        if outcome.dropped_because is None:
            complete = partial(self._ledger.complete, lease, outcome.group)
            await self._report(lease, "ready", complete, outcome.group)
        else:
            reason, mean = outcome.dropped_because, outcome.group.mean_reward
            drop = partial(self._ledger.drop_filtered, lease, reason, mean)
            await self._report(lease, "filtered", drop)
        self._budgets.succeeded(lease.request.consumer)
        return outcome.dropped_because is None

    async def _retry_or_fail(self, lease: Lease, error: ServiceError) -> None:
        if lease.attempt >= self._config.max_attempts:
            await self._fail(lease, f"{lease.attempt} attempts; last: {_full(error)}")
            return
        log.info(
            "rollout goes back to the queue",
            extra={"rollout_id": lease.rollout_id, "reason": str(error)},
        )
        await self._requeue(lease, str(error))

    async def _requeue(self, lease: Lease, reason: str) -> None:
        await self._report(lease, "requeued", partial(self._ledger.requeue, lease, reason))

    async def _fail(self, lease: Lease, reason: str) -> None:
        reason = reason.encode(errors="replace").decode()  # no store takes half a character
        group_id = lease.request.prompt.group_id
        extra = {"rollout_id": lease.rollout_id, "group_id": group_id, "reason": reason}
        log.warning("rollout failed", extra=extra)
        # Anyone may read this one: no completion and no traceback.
        first = reason.partition("\n")[0]
        brief = f"rollout {lease.rollout_id!r} of group {group_id!r}: {first}"
        self._budgets.failed(lease.request.consumer, brief)
        await self._report(lease, "failed", partial(self._ledger.fail, lease, reason))

    async def _report(
        self,
        lease: Lease,
        outcome: AttemptOutcome,
        report: Callable[[], Awaitable[None]],
        group: TrajectoryGroup | None = None,
    ) -> None:
        """Tell the ledger what came of a lease, however long it does not answer; then the observer."""
        await self._until_reported(lease, report)
        seconds = self._now() - self._leased_at[lease.key]
        self._observer.ended(Attempt(lease.request, outcome, seconds, group))

    async def _until_reported(self, lease: Lease, report: Callable[[], Awaitable[None]]) -> None:
        self._reporting.add(lease.key)
        while True:
            try:
                return await report()
            except StateError as error:
                extra = {"rollout_id": lease.rollout_id, "reason": str(error)}
                log.warning("the ledger does not answer", extra=extra)
                await asyncio.sleep(OUTAGE_PAUSE_S)


def _full(error: Exception) -> str:
    """What an error says, with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def _is_among(keys: set[str], lease: Lease) -> bool:
    return lease.key in keys
