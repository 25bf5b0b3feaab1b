"""The rollout service: ledger, executor, staleness, rewards and a generator behind one face.

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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry

from headway.contracts.config.base import PartConfig
from headway.contracts.config.gateway import ExecutorConfig, RetentionConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.context import ContextLimits
from headway.contracts.engines import Generator
from headway.contracts.errors import BackendError, Fenced, NotFound, Starved, StateError
from headway.contracts.http.consumers import ConsumerRequest
from headway.contracts.http.ledger import LedgerAudit, LedgerCounts
from headway.contracts.http.rewards import AnswerToScore
from headway.contracts.http.rollouts import WaitRequest
from headway.contracts.http.status import StatusResponse
from headway.contracts.types import (
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    RolloutRequest,
    WeightUpdateMeta,
)
from headway.rollout.consumers import Attachment, Consumers, Publisher
from headway.rollout.executor import Executor
from headway.rollout.facilities import Facilities, NoOutbound, NoSandbox
from headway.rollout.ledger.base import OPEN_STATES, Admission, Ledger
from headway.rollout.player import Player
from headway.rollout.publishing.updates import ABANDON_S, WeightUpdates
from headway.rollout.rewards.jury import Judgement, Jury
from headway.rollout.rewards.scoring import Scorer
from headway.rollout.sessions.sessions import Sessions
from headway.rollout.signal import Signal
from headway.rollout.tokenizer import TextTokenizer
from headway.rollout.workflows.base import Stage

log = logging.getLogger(__name__)

WATCH_S = 0.2
"""Between looks at a ledger that others write to, too."""


def no_facilities() -> Facilities:
    """Neither programs nor calls."""
    return Facilities(NoSandbox(), NoOutbound())


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a service plays with besides its generator; the defaults are those of one server alone."""

    facilities: Facilities
    sessions: Sessions | None = None
    limit: Callable[[], int] | None = None
    """Trajectories in play at once, at most; None takes `executor.max_concurrent`."""
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    abandon_s: float = ABANDON_S
    metrics: CollectorRegistry | None = None
    """Where figures of the service's own are shown."""


class RolloutService:
    """Prompt in, scored trajectory out, exactly once."""

    def __init__(
        self,
        generator: Generator,
        ledger: Ledger,
        tokenizer: TextTokenizer | None,
        config: ExecutorConfig,
        surroundings: Surroundings | None = None,
    ) -> None:
        around = surroundings or Surroundings(no_facilities())
        self.generator = generator
        self.tokenizer = tokenizer
        self.ledger = ledger
        self.sessions = around.sessions
        self._config = config
        self._retention = around.retention
        self._facilities = around.facilities
        self._scorer = Scorer(config, around.facilities)
        self._jury = Jury(self._scorer, tokenizer, config, around.metrics)
        self._consumers = Consumers(ledger)
        self._changed = changed = Signal()
        self._player = Player(generator, tokenizer, self._stage, changed, config.max_concurrent)
        limit = around.limit or (lambda: config.max_concurrent)
        self._executor = Executor(ledger, self._player.play, self._admit, limit, config, changed)
        self._updates = WeightUpdates(generator, self._consumers, changed, around.abandon_s)
        self._attaching = asyncio.Lock()
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Find out who is attached, then begin to play."""
        await self._consumers.refresh()
        self._executor.start()
        self._loops = [asyncio.create_task(self._tidy(), name="forget old rollouts")]
        if self.ledger.is_shared:
            self._loops.append(asyncio.create_task(self._watch(), name="watch the ledger"))

    async def aclose(self) -> None:
        """Stop playing; rollouts in play go back to the queue."""
        await self._updates.end(BackendError("the service is shutting down"))
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._executor.aclose()
        await self._scorer.aclose()

    async def warm_up(self) -> None:
        """Start the processes that run verifiers, for which the first answer would wait otherwise."""
        await self._scorer.start()

    def notify(self) -> None:
        """Something outside changed: a version that another gateway committed, the room to play."""
        self._changed.notify()

    async def drain(self) -> None:
        """Start no more rollouts; those in play may end."""
        await self._executor.stop_claiming()

    @property
    def version(self) -> PolicyVersion:
        """What the bound refers to: the newest version, published or attached with."""
        return max(self.generator.head, self._consumers.version)

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """Generate one sequence, outside the ledger; one that was interrupted comes back as it is."""
        return await self.generator.agenerate(req)

    async def score(self, reward: PartConfig, answers: Sequence[AnswerToScore]) -> list[Judgement]:
        """Judge answers outside of any rollout; see `Jury.judge`."""
        return await self._jury.judge(reward, answers)

    async def submit(self, requests: Sequence[RolloutRequest]) -> list[bool]:
        """Queue prompt groups; names, arguments and lengths are checked before anything is stored.

        Raises:
            RequestTooLong: a prompt + max_new_tokens exceed what any server can hold.
        """
        for request in requests:
            self._player.check(request)
            self._scorer.prepare(request.reward)
        await self._check_lengths(requests)
        config = self._config
        new = await self.ledger.submit(requests, config.max_queued, config.max_queued_each)
        self._changed.notify()
        return new

    async def _check_lengths(self, requests: Sequence[RolloutRequest]) -> None:
        limit = ContextLimits.of(self.generator.statuses()).largest
        if limit is None:
            return
        doubtful = [each for each in requests if self._player.may_be_too_long(each, limit)]
        if not doubtful:
            return
        too_long = await asyncio.to_thread(self._player.too_long, doubtful, limit)
        for rollout_id, error in too_long.items():
            if await self.ledger.get(rollout_id, with_payload=False) is None:
                raise error  # else it is sent again, and was taken when servers held more

    async def cancel(self, rollout_ids: Sequence[str], reason: str) -> int:
        """End rollouts that are not consumed yet; returns the groups."""
        cancelled = await self.ledger.cancel(rollout_ids, reason)
        ids = set(rollout_ids)
        await self._executor.stop(lambda lease: lease.rollout_id in ids)
        self._changed.notify()
        return cancelled

    async def requeue(self, rollout_ids: Sequence[str]) -> int:
        """Play failed rollouts once more; returns the groups."""
        revived = await self.ledger.revive(rollout_ids)
        self._changed.notify()
        return revived

    async def wait(self, request: WaitRequest) -> tuple[tuple[bytes, ...] | None, int]:
        """Payloads of `count` finished groups, oldest first, or None and how many are ready.

        Raises:
            Fenced: a newer incarnation of the consumer has attached.
            ErrorBudgetExceeded: too many rollouts failed.
            Starved: the attached consumer has fewer groups outstanding than it waits for.
        """
        deadline = time.monotonic() + request.timeout_s
        count = request.count if request.rollout_ids is None else len(request.rollout_ids)
        while True:
            self._executor.check_budget(request.consumer)
            others, kept = self._num_other_changes, self._executor.num_kept
            payloads, num_ready = await self._deliver(request)
            left = deadline - time.monotonic()
            if payloads is not None or left <= 0:
                return payloads, num_ready
            enough = kept + max(1, count - num_ready)
            try:
                async with asyncio.timeout(left):
                    while others == self._num_other_changes and self._executor.num_kept < enough:
                        await self._changed.event().wait()
            except TimeoutError:
                return await self._deliver(request)

    @property
    def _num_other_changes(self) -> int:
        """Changes besides rollouts that ended with a result, of which a batch takes many."""
        executor = self._executor
        return self._changed.count - executor.num_kept - executor.num_left

    async def _deliver(self, request: WaitRequest) -> tuple[tuple[bytes, ...] | None, int]:
        await self._check_term(request.term)
        if request.rollout_ids is not None:
            found = await self.ledger.deliver_exactly(
                request.delivery_id,
                request.rollout_ids,
                self.version if request.version is None else request.version,
            )
            return found.payloads, found.num_ready
        is_bounded = request.consumer == self._consumers.name
        bound = self._consumers.bound if is_bounded else None
        found = await self.ledger.deliver(
            request.delivery_id,
            request.count,
            request.consumer,
            self.version,
            None if bound is None else bound.max_staleness,
        )
        if found.dropped:
            self._changed.notify()
        if found.payloads is None and is_bounded and not found.is_held_back:
            await self._check_supply(request.consumer, request.count)
        return found.payloads, found.num_ready

    async def _check_supply(self, consumer: str, count: int) -> None:
        """A consumer whose rollouts failed or were dropped must hear that it waits in vain."""
        outstanding = await self.ledger.outstanding(consumer)
        if outstanding < count:
            raise Starved(
                f"{outstanding} prompt groups of {consumer!r} are outstanding, {count} are waited for; "
                "submit more"
            )

    async def attach(self, request: ConsumerRequest) -> Attachment:
        """Bind the consumer whose steps and versions the bound refers to; see `ConsumerSpec`.

        What an older incarnation of it still publishes is given up.

        Raises:
            Conflict: another consumer is attached.
        """
        self._consumers.check_free(request.consumer)
        async with self._attaching:
            await self._updates.end(Fenced(f"consumer {request.consumer!r} has attached anew"))
            attachment = await self._consumers.attach(request)
            self._executor.forgive()
            return attachment

    async def detach(self, consumer: str) -> int:
        """End a consumer; its unconsumed trajectories are cancelled and counted.

        One that never attached, and only waited, ends too if it left anything.

        Raises:
            NotFound: it is not attached, and has nothing that could still be consumed.
        """
        await self._consumers.refresh()
        is_attached = self._consumers.name == consumer
        if is_attached:
            await self._updates.end(Fenced(f"consumer {consumer!r} was detached"))
        elif not _open(await self.ledger.counts(consumer)):
            raise NotFound(f"consumer {consumer!r} is not attached, and has no open rollouts")
        async with self._executor.unbound(consumer):
            if is_attached:
                await self._consumers.detach()
            cancelled = await self.ledger.cancel_all(consumer, "the consumer detached")
        self._changed.notify()
        return cancelled

    async def consumed(
        self, rollout_ids: Sequence[str], step: int, checkpoint_step: int, term: int = 0
    ) -> None:
        """Record that a step trained on these groups.

        Raises:
            Fenced: a newer incarnation of the consumer has attached: they are its to train on.
        """
        await self._check_term(term)
        await self.ledger.consume(rollout_ids, step, checkpoint_step)

    async def _check_term(self, term: int) -> None:
        """Also against what another gateway has just written."""
        if term and self.ledger.is_shared and await self._consumers.refresh():
            self._executor.forgive()
        self._consumers.check_term(term)

    async def update_weights(
        self,
        meta: WeightUpdateMeta,
        policy: UpdatePolicy | None = None,
        publisher: Publisher | None = None,
    ) -> PolicyVersion:
        """Commit a version on every server, then admit against it; see `WeightUpdates.update`."""
        return await self._updates.update(meta, policy, publisher)

    async def cancel_update(
        self, version: PolicyVersion, reason: str, publisher: Publisher | None = None
    ) -> PolicyVersion:
        """See `WeightUpdates.cancel`."""
        return await self._updates.cancel(version, reason, publisher)

    async def status(self) -> StatusResponse:
        """A picture of the service now."""
        bound = self._consumers.bound
        counts = await self.ledger.counts()
        servers = self.generator.statuses()
        limits = ContextLimits.of(servers)
        return StatusResponse(
            version=self.generator.version,
            head=self.generator.head,
            running=self._executor.running,
            capacity=await self.headroom(),
            max_staleness=None if bound is None else bound.max_staleness,
            counts=counts,
            servers=servers,
            smallest_context_tokens=limits.smallest,
            largest_context_tokens=limits.largest,
            updates=self._updates.count,
            updates_in_flight=self.generator.updates_in_flight,
            generated_tokens=self.generator.generated_tokens,
            last_failures=self._executor.last_failures[-5:],
        )

    async def headroom(self) -> int:
        """Trajectories of the attached consumer that may start now; may be negative."""
        bound, name = self._consumers.bound, self._consumers.name
        if bound is None or name is None:
            return self._executor.free
        counts = await self.ledger.counts(name)
        return min(self._executor.free, bound.budget(self.version) - _outstanding(counts))

    async def audit(self) -> LedgerAudit:
        """The ledger's proof."""
        return await self.ledger.audit()

    def _admit(self, free: int) -> Admission:
        bound = self._consumers.bound
        budget = None if bound is None else bound.budget(self.version)
        return Admission(self.version, free, self._consumers.name, budget)

    def _stage(self, request: RolloutRequest) -> Stage:
        return Stage(
            generate=self.generator.agenerate,
            score=partial(self._scorer.score, request.reward),
            facilities=self._facilities,
            sessions=self.sessions,
        )

    async def _tidy(self) -> None:
        while self._retention.ended_s is not None:
            await asyncio.sleep(self._retention.interval_s)
            try:
                await self.ledger.compact(self._retention.ended_s)
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
                    if await self._consumers.refresh():
                        self._executor.forgive()
                    self._changed.notify()
            except StateError as error:
                log.warning("the ledger does not answer", extra={"reason": str(error)})
            await asyncio.sleep(WATCH_S)


def _open(counts: LedgerCounts) -> int:
    """What may still be consumed."""
    return sum(getattr(counts, state) for state in OPEN_STATES)


def _outstanding(counts: LedgerCounts) -> int:
    """What the bound counts."""
    return counts.leased + counts.ready + counts.delivered + counts.consumed
