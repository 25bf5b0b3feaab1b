"""The rollout service: ledger, executor, staleness, rewards and a generator behind one object.

`RolloutService` is the asynchronous core of a gateway (generator = fleet) and of a generation
server (generator = its own backend); `app.create_app` serves it, `RemoteInferenceEngine` is the
inverse over HTTP, and `in_process.InProcessEngine` drives it from a synchronous caller.

Everything runs on one event loop. Who waits: `wait` on `changed`, raised whenever a
rollout ends, a version is committed or a consumer attaches; where other gateways share the ledger,
also whenever they changed it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from gateway.consumers.consumers import Attachment, Consumers
from gateway.consumers.owners import Owners
from gateway.execution.executor import RolloutExecutor
from gateway.execution.rollout_runner import RolloutRunner
from gateway.fleet.resume import Generate
from gateway.ledger.base import (
    DeliveryQueue,
    Ledger,
    LedgerReader,
    RolloutQueue,
)
from gateway.ledger.observer import LedgerObservers
from gateway.ledger.records import OPEN_STATES, Capacity, Delivery
from gateway.publishing.updates import WeightUpdates
from gateway.rewards.batch_scorer import BatchScorer
from gateway.rewards.scoring import Scorer
from gateway.service.options import ServiceOptions, no_shared_services
from gateway.service.submission import SubmissionChecker
from gateway.workflows.base import RolloutContext
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.context import ContextLimits
from headway.contracts.engines import Generator
from headway.contracts.errors import (
    BackendError,
    Fenced,
    NotEnoughWork,
    NotFound,
    StateError,
)
from headway.contracts.http.consumers import ConsumerRequest
from headway.contracts.http.ledger import LedgerCounts
from headway.contracts.http.rollouts import WaitRequest
from headway.contracts.http.status import StatusResponse
from headway.contracts.types import (
    PolicyVersion,
    RolloutRequest,
)
from headway.runtime.fair_pool import CALLER
from headway.runtime.tasks import Signal, cancel_and_wait
from headway.text.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

WATCH_S = 0.2
"""Seconds between looks at a ledger that others write to, too."""


class RolloutService:
    """Prompt in, scored trajectory out, exactly once."""

    def __init__(
        self,
        generator: Generator,
        ledger: Ledger,
        tokenizer: TextTokenizer | None,
        config: ExecutorConfig,
        options: ServiceOptions | None = None,
    ) -> None:
        options = options or ServiceOptions(no_shared_services())
        self.generator = generator
        self.tokenizer = tokenizer
        self.ledger: LedgerReader = ledger
        self._rollouts: RolloutQueue = ledger
        self._deliveries: DeliveryQueue = ledger
        self._is_shared = ledger.is_shared
        self._observer = LedgerObservers(options.observers)
        self.sessions = options.sessions
        self._config = config
        self._retention = options.retention
        self._services = options.services
        self.scorer = Scorer(config, options.services)
        self.batch_scorer = BatchScorer(self.scorer, tokenizer, config, options.metrics)
        self._consumers = Consumers(ledger)
        self._owners = Owners(ledger)
        self.changed = changed = Signal()
        self._runner = RolloutRunner(
            generator, tokenizer, self._context_of, changed, config.max_concurrent
        )
        limit = options.limit or (lambda: config.max_concurrent)
        self.executor = RolloutExecutor(
            ledger, self._observer, self._runner.run, self._admit, limit, config, changed
        )
        self.updates = WeightUpdates(
            generator.weights, self._consumers, self._owners, changed, options.abandon_s
        )
        self._checker = SubmissionChecker(generator, ledger, self._runner, self.scorer, config)
        self._attaching = asyncio.Lock()
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Find out which consumer is attached, then begin to run rollouts."""
        await self._consumers.refresh()
        self.executor.start()
        self._loops = [asyncio.create_task(self._tidy(), name="forget old rollouts")]
        if self._is_shared:
            self._loops.append(asyncio.create_task(self._watch(), name="watch the ledger"))

    async def aclose(self) -> None:
        """Stop; running rollouts go back to the queue."""
        await self.updates.end(BackendError("the service is shutting down"))
        await cancel_and_wait(self._loops)
        await self.executor.aclose()
        await self.scorer.aclose()

    @property
    def version(self) -> PolicyVersion:
        """Version to which the bound refers: the newest one, published or attached with."""
        return max(self.generator.head, self._consumers.version)

    async def submit(self, requests: Sequence[RolloutRequest]) -> list[bool]:
        """Queue prompt groups; what can never be run is refused before anything is stored.

        Raises:
            UnknownName, ConfigError: workflow, reward or filter do not exist, or cannot be made.
            DataError: a prompt without tokens, with unknown ones, or that its workflow cannot begin with.
            RequestTooLong: a prompt + max_new_tokens exceed what any server can hold.
            Forbidden: a consumer of theirs is another token's.
        """
        consumers = {request.consumer for request in requests}
        await self._owners.check(consumers)
        CALLER.set(requests[0].consumer if requests else "")
        await self._checker.check(requests)
        await self._owners.claim(consumers)
        config = self._config
        new = await self._rollouts.submit(
            requests, config.max_queued, config.max_queued_per_consumer
        )
        self.changed.notify()
        return new

    async def cancel(self, rollout_ids: Sequence[str], reason: str) -> int:
        """End rollouts that are not consumed yet; returns the groups.

        Raises:
            Forbidden: one of them is another token's.
        """
        await self._owners.check_rollouts(rollout_ids)
        cancelled = await self._rollouts.cancel(rollout_ids, reason)
        ids = set(rollout_ids)
        await self.executor.stop(lambda lease: lease.rollout_id in ids)
        self.changed.notify()
        return cancelled

    async def requeue(self, rollout_ids: Sequence[str]) -> int:
        """Run failed rollouts once more; return the number of groups.

        Raises:
            Forbidden: one of them is another token's.
        """
        await self._owners.check_rollouts(rollout_ids)
        revived = await self._rollouts.revive(rollout_ids)
        self.changed.notify()
        return revived

    async def wait(self, request: WaitRequest) -> tuple[tuple[bytes, ...] | None, int]:
        """Payloads of `count` finished groups, oldest first, or None and how many are ready.

        Raises:
            Fenced: a newer incarnation of the consumer has attached.
            ErrorBudgetExceeded: too many rollouts of the consumer failed.
            NotEnoughWork: the attached consumer has fewer groups outstanding than it waits for.
            Forbidden: the consumer is another token's.
        """
        await self._owners.check((request.consumer,))
        now = asyncio.get_running_loop().time
        deadline = now() + request.timeout_s
        count = request.count if request.rollout_ids is None else len(request.rollout_ids)
        while True:
            if request.rollout_ids is None:  # those that are waited for by id tell of their own end
                self.executor.check_budget(request.consumer)
            others, kept = self._num_other_changes, self.executor.num_kept
            payloads, num_ready = await self._deliver(request)
            left = deadline - now()
            if payloads is not None or left <= 0:
                return payloads, num_ready
            enough = kept + max(1, count - num_ready)
            try:
                async with asyncio.timeout(left):
                    while others == self._num_other_changes and self.executor.num_kept < enough:
                        await self.changed.event().wait()
            except TimeoutError:
                return await self._deliver(request)

    @property
    def _num_other_changes(self) -> int:
        """Number of changes besides rollouts that ended with a result; a batch takes many of those."""
        executor = self.executor
        return self.changed.count - executor.num_kept - executor.num_left

    async def _deliver(self, request: WaitRequest) -> tuple[tuple[bytes, ...] | None, int]:
        await self._check_term(request.term)
        if request.rollout_ids is not None:
            found = await self._deliveries.deliver_exactly(
                request.delivery_id,
                request.rollout_ids,
                self.version if request.version is None else request.version,
            )
            self._observe(found)
            return found.payloads, found.num_ready
        is_bounded = request.consumer == self._consumers.name
        bound = self._consumers.bound if is_bounded else None
        max_staleness = None if bound is None else bound.max_staleness
        # One too high by mistake must not drop what is sampled now.
        furthest = self.version + max(1, max_staleness or 0)
        found = await self._deliveries.deliver(
            request.delivery_id,
            request.count,
            request.consumer,
            self.version,
            max_staleness,
            None if request.version is None else min(request.version, furthest),
        )
        self._observe(found)
        if found.dropped:
            self.changed.notify()
        if found.payloads is None and is_bounded and not found.is_held_back:
            await self._check_supply(request.consumer, request.count)
        return found.payloads, found.num_ready

    def _observe(self, found: Delivery) -> None:
        for staleness, num_trajectories in found.given:
            self._observer.delivered(max(0, staleness), num_trajectories)

    async def _check_supply(self, consumer: str, count: int) -> None:
        """A consumer whose rollouts failed or were dropped must learn that it waits in vain."""
        outstanding = await self._deliveries.outstanding(consumer)
        if outstanding < count:
            raise NotEnoughWork(
                f"{outstanding} prompt groups of {consumer!r} are outstanding, {count} are waited for; "
                "submit more"
            )

    async def attach(self, request: ConsumerRequest) -> Attachment:
        """Bind the consumer whose steps and versions the bound refers to; see `ConsumerSpec`.

        What an older incarnation of it still publishes is given up.

        Raises:
            Conflict: another consumer is attached.
            Forbidden: it is another token's.
        """
        await self._owners.check((request.consumer,))
        self._consumers.check_free(request.consumer)
        async with self._attaching:
            await self._owners.claim((request.consumer,))
            await self.updates.end(Fenced(f"consumer {request.consumer!r} has attached again"))
            attachment = await self._consumers.attach(request)
            self.executor.reset_budget(request.consumer)
            return attachment

    async def detach(self, consumer: str) -> int:
        """End a consumer; its unconsumed trajectories are cancelled and counted.

        One that never attached, and only waited, ends too if it left anything.

        Raises:
            NotFound: it is not attached, and has nothing that could still be consumed.
            Forbidden: it is another token's.
        """
        await self._owners.check((consumer,))
        await self._consumers.refresh()
        is_attached = self._consumers.name == consumer
        if is_attached:
            await self.updates.end(Fenced(f"consumer {consumer!r} was detached"))
        elif not _open(await self.ledger.counts(consumer)):
            raise NotFound(f"consumer {consumer!r} is not attached, and has no open rollouts")
        async with self.executor.unbound(consumer):
            if is_attached:
                await self._consumers.detach()
            cancelled = await self._rollouts.cancel_all(consumer, "the consumer detached")
            await self._owners.release(consumer)
        self.executor.reset_budget(consumer)
        return cancelled

    async def consumed(
        self, rollout_ids: Sequence[str], step: int, checkpoint_step: int, term: int = 0
    ) -> None:
        """Record that a step trained on these groups.

        Raises:
            Fenced: a newer incarnation of the consumer has attached: they are its to train on.
            Forbidden: one of them is another token's.
        """
        await self._owners.check_rollouts(rollout_ids)
        await self._check_term(term)
        await self._deliveries.consume(rollout_ids, step, checkpoint_step)

    async def _check_term(self, term: int) -> None:
        """Also against what another gateway has just written."""
        if term and self._is_shared:
            await self._on_attachment()
        self._consumers.check_term(term)

    async def _on_attachment(self) -> None:
        """Read who is attached; who attached at another gateway begins with a full budget here, too."""
        if await self._consumers.refresh() and self._consumers.name is not None:
            self.executor.reset_budget(self._consumers.name)

    async def status(self) -> StatusResponse:
        """A picture of the service now."""
        bound = self._consumers.bound
        counts = await self.ledger.counts()
        servers = self.generator.statuses()
        limits = ContextLimits.of(servers)
        return StatusResponse(
            version=self.generator.version,
            head=self.generator.head,
            running=self.executor.running,
            capacity=await self.headroom(),
            max_staleness=None if bound is None else bound.max_staleness,
            counts=counts,
            servers=servers,
            smallest_context_tokens=limits.smallest,
            largest_context_tokens=limits.largest,
            updates=self.updates.count,
            updates_in_flight=self.generator.updates_in_flight,
            generated_tokens=self.generator.generated_tokens,
            last_failures=self.executor.last_failures[-5:],
            services_away=self._services.outbound.outages.away(),
        )

    async def headroom(self) -> int:
        """Trajectories of the attached consumer that may start now; may be negative."""
        bound, name = self._consumers.bound, self._consumers.name
        if bound is None or name is None:
            return self.executor.free
        counts = await self.ledger.counts(name)
        budget = bound.budget(self.generator.sampled_version)
        return min(self.executor.free, budget - _outstanding(counts))

    def _admit(self, free: int) -> Capacity:
        bound, version = self._consumers.bound, self.generator.sampled_version
        budget = None if bound is None else bound.budget(version)
        return Capacity(version, free, self._consumers.name, budget)

    def _context_of(self, request: RolloutRequest, generate: Generate) -> RolloutContext:
        return RolloutContext(
            generate=generate,
            score=partial(self.scorer.score, request.reward),
            services=self._services,
            sessions=self.sessions,
        )

    async def _tidy(self) -> None:
        while self._retention.ended_s is not None:
            await asyncio.sleep(self._retention.interval_s)
            try:
                await self._rollouts.compact(self._retention.ended_s)
            except StateError as error:
                log.warning("old rollouts could not be forgotten", extra={"reason": str(error)})

    async def _watch(self) -> None:
        """Heed what other gateways wrote."""
        seen = -1
        while True:
            try:
                revision = await self.ledger.revision()
                if revision != seen:
                    seen = revision
                    await self._on_attachment()
                    self.changed.notify()
            except StateError as error:
                log.warning("the ledger does not answer", extra={"reason": str(error)})
            await asyncio.sleep(WATCH_S)


def _open(counts: LedgerCounts) -> int:
    """Return the trajectories that may still be consumed."""
    return sum(getattr(counts, state) for state in OPEN_STATES)


def _outstanding(counts: LedgerCounts) -> int:
    """Return the trajectories that the bound counts."""
    return counts.leased + counts.ready + counts.delivered + counts.consumed
