"""The rollout service: ledger, executor, staleness, rewards and a generator behind one face.

`RolloutService` is the asynchronous core of a gateway (generator = fleet) and of a generation
server (generator = its own backend); `app.create_app` serves it, `RemoteInferenceEngine` is the
inverse over HTTP, and `in_process.InProcessEngine` drives it from a synchronous caller.

Everything runs on one event loop. Who waits: `wait` on `executor.changed`, raised whenever a
rollout ends, a version is committed or a consumer attaches.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.engines import Generator
from headway.contracts.errors import (
    BackendError,
    ConfigError,
    Conflict,
    Fenced,
    NotFound,
    Starved,
    SyncError,
    WorkflowError,
)
from headway.contracts.http import (
    ConsumerRequest,
    LedgerAudit,
    StatusResponse,
    WaitRequest,
)
from headway.contracts.types import (
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    RolloutRequest,
    TrajectoryGroup,
    WeightUpdateMeta,
)
from headway.rollout.executor import Executor
from headway.rollout.facilities import Facilities, NoOutbound, NoSandbox
from headway.rollout.ledger.base import Ledger
from headway.rollout.resume import generate_whole
from headway.rollout.rewards.base import make_reward
from headway.rollout.rewards.pool import RewardPool
from headway.rollout.shared_update import SharedUpdate
from headway.rollout.tokenizer import TextTokenizer
from headway.rollout.workflows.base import Sample, Stage, make_workflow
from headway.runtime.staleness import StalenessController, StalenessSnapshot

log = logging.getLogger(__name__)

CONSUMER_NOTE = "consumer"
ABANDON_S = 5.0
"""A publication that no request has waited for so long is given up: its publisher is gone."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """A consumer as its attachment knows it."""

    name: str
    term: int


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a consumer learns when it attaches."""

    given_back: int
    """Groups that a former incarnation had received but not kept."""
    term: int
    """Number of this attachment; an older incarnation is refused."""


class RolloutService:
    """Prompt in, scored trajectory out, exactly once."""

    def __init__(
        self,
        generator: Generator,
        ledger: Ledger,
        tokenizer: TextTokenizer | None,
        config: ExecutorConfig,
        abandon_s: float = ABANDON_S,
    ) -> None:
        self.generator = generator
        self._abandon_s = abandon_s
        self._ledger = ledger
        self._tokenizer = tokenizer
        self._config = config
        self._staleness = StalenessController(config.max_concurrent, generator.head)
        self._executor = Executor(ledger, self._staleness, self._play_group, config)
        self._rewards = RewardPool(config.reward_workers, config.reward_timeout_s)
        self._consumer: ConsumerRequest | None = None
        self._term = 0
        self._attaching = asyncio.Lock()
        self._update: SharedUpdate | None = None
        self._updates = 0

    async def start(self) -> None:
        """Restore the counters of an attached consumer, then begin to play."""
        saved = json.loads(await self._ledger.get_note(CONSUMER_NOTE) or "{}") or {}
        self._term = saved.get("term", 0)
        if "request" in saved:
            await self._bind(ConsumerRequest.model_validate(saved["request"]), saved["base"])
            self._staleness.set_version(max(self.generator.head, self._staleness.version))
        self._executor.start()

    async def aclose(self) -> None:
        """Stop playing; rollouts in play go back to the queue."""
        if self._update is not None:
            await self._update.end(BackendError("the service is shutting down"))
        await self._executor.aclose()
        self._rewards.close()

    async def drain(self) -> None:
        """Start no more rollouts; those in play may end."""
        await self._executor.stop_claiming()

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """Generate one sequence, outside the ledger; one that was interrupted comes back as it is."""
        return await self.generator.agenerate(req)

    async def submit(self, requests: Sequence[RolloutRequest]) -> list[bool]:
        """Queue prompt groups; names and arguments are checked before anything is stored."""
        for request in requests:
            self._check(request)
        new = await self._ledger.submit(requests, self._config.max_queued)
        self._executor.changed.notify()
        return new

    async def wait(self, request: WaitRequest) -> tuple[tuple[bytes, ...] | None, int]:
        """Payloads of `count` finished groups, oldest first, or None and how many are ready.

        Raises:
            ErrorBudgetExceeded: too many rollouts failed.
            Starved: the attached consumer has fewer groups outstanding than it waits for.
        """
        deadline = time.monotonic() + request.timeout_s
        while True:
            changed = self._executor.changed.event()
            self._executor.check_budget()
            num_ready = 0
            if request.rollout_ids is not None or not self._staleness.has_due_running():
                delivery = await self._ledger.deliver(
                    request.delivery_id,
                    request.count,
                    request.consumer,
                    request.rollout_ids,
                    self._staleness.version,
                    self._staleness.max_staleness,
                )
                if delivery.dropped:
                    self._staleness.drop(delivery.dropped)
                    self._executor.changed.notify()
                if delivery.payloads is not None:
                    return delivery.payloads, delivery.num_ready
                num_ready = delivery.num_ready
                if request.rollout_ids is None:
                    await self._check_supply(request.consumer, request.count)
            left = deadline - time.monotonic()
            if left <= 0:
                return None, num_ready
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                return None, num_ready

    async def _check_supply(self, consumer: str, count: int) -> None:
        """A consumer whose rollouts failed or were dropped must hear that it waits in vain."""
        if self._consumer is None or self._consumer.consumer != consumer:
            return
        outstanding = await self._ledger.outstanding(consumer)
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
        if self._consumer is not None and self._consumer.consumer != request.consumer:
            raise Conflict(
                f"consumer {self._consumer.consumer!r} is attached; detach it first "
                f"(headway detach URL {self._consumer.consumer}), or use another gateway"
            )
        async with self._attaching:
            self._term += 1
            if self._update is not None:
                await self._update.end(Fenced(f"consumer {request.consumer!r} has attached anew"))
            given_back = await self._ledger.give_back(request.consumer, request.step)
            counts = await self._ledger.counts(request.consumer)
            base = request.version * request.batch_size - counts.consumed
            note = {"term": self._term, "request": request.model_dump(), "base": base}
            await self._ledger.put_note(CONSUMER_NOTE, json.dumps(note))
            await self._bind(request, base)
            return Attachment(given_back, self._term)

    async def detach(self, consumer: str) -> int:
        """End a consumer; its unconsumed trajectories are cancelled and counted.

        Raises:
            NotFound: it is not attached.
        """
        if self._consumer is None or self._consumer.consumer != consumer:
            raise NotFound(f"consumer {consumer!r} is not attached")
        if self._update is not None:
            await self._update.end(Fenced(f"consumer {consumer!r} was detached"))
        async with self._executor.unbound():
            cancelled = await self._ledger.cancel(consumer)
        await self._ledger.put_note(CONSUMER_NOTE, json.dumps({"term": self._term}))
        self._staleness.detach()
        self._consumer = None
        self._executor.changed.notify()
        return cancelled

    async def consumed(self, rollout_ids: Sequence[str], step: int, checkpoint_step: int) -> None:
        """Record that a step trained on these groups."""
        await self._ledger.consume(rollout_ids, step, checkpoint_step)

    async def update_weights(
        self,
        meta: WeightUpdateMeta,
        policy: UpdatePolicy | None = None,
        publisher: Publisher | None = None,
    ) -> PolicyVersion:
        """Commit a version on every server, then admit against it.

        A repeat of the version that is under way waits for the same commit.

        Raises:
            Conflict: another consumer is attached.
            Fenced: a newer incarnation of the publisher has attached.
            SyncError: the version was refused or given up; the old one goes on serving.
        """
        self._check_publisher(publisher)
        while (update := self._update) is not None and not update.is_done and update.meta != meta:
            await update.until_done()
            self._check_publisher(publisher)
        if update is None or update.is_done:
            update = self._update = SharedUpdate(meta, self._publish(meta, policy), self._abandon_s)
        return await update.wait()

    async def cancel_update(
        self, version: PolicyVersion, reason: str, publisher: Publisher | None = None
    ) -> PolicyVersion:
        """The publisher gives a version up; returns the one that serves.

        Raises:
            Conflict, Fenced: as `update_weights`.
        """
        self._check_publisher(publisher)
        log.warning("version given up", extra={"version": version, "reason": reason})
        if self._update is not None and self._update.meta.version == version:
            await self._update.end(SyncError(f"version {version} was given up: {reason}"))
        await self.generator.cancel_update(version)
        return self.generator.version

    async def _publish(self, meta: WeightUpdateMeta, policy: UpdatePolicy | None) -> PolicyVersion:
        before = self.generator.version
        version = await self.generator.update_weights(meta, policy)
        self._updates += version != before
        self._staleness.set_version(self.generator.head)
        self._executor.changed.notify()
        return version

    def _check_publisher(self, publisher: Publisher | None) -> None:
        attached = self._consumer and self._consumer.consumer
        if publisher is None:
            if attached is not None:
                raise Conflict(f"consumer {attached!r} is attached; only it publishes weights")
        elif attached is None:
            raise Fenced(f"consumer {publisher.name!r} is not attached any more")
        elif publisher.name != attached:
            raise Conflict(f"consumer {attached!r} is attached, and not {publisher.name!r}")
        elif publisher.term != self._term:
            raise Fenced(
                f"consumer {attached!r} has attached anew: term {publisher.term} was followed by "
                f"{self._term}; end the older process"
            )

    async def status(self) -> StatusResponse:
        """A picture of the service now."""
        return StatusResponse(
            version=self.generator.version,
            head=self.generator.head,
            running=self._staleness.running,
            capacity=self._staleness.capacity(),
            max_staleness=self._staleness.max_staleness,
            counts=await self._ledger.counts(),
            servers=self.generator.statuses(),
            updates=self._updates,
            updates_in_flight=self.generator.updates_in_flight,
            generated_tokens=self.generator.generated_tokens,
            last_failures=self._executor.last_failures[-5:],
        )

    async def audit(self) -> LedgerAudit:
        """The ledger's proof."""
        return await self._ledger.audit()

    async def _bind(self, request: ConsumerRequest, base: int) -> None:
        """`base + consumed + unconsumed results` is the controller's `accepted` at any moment."""
        counts = await self._ledger.counts(request.consumer)
        accepted = base + counts.consumed + counts.ready + counts.delivered
        snapshot = StalenessSnapshot(request.version, accepted)
        self._staleness.attach(request.batch_size, request.max_staleness, snapshot)
        self._consumer = request
        self._executor.bind(request.consumer)

    def _check(self, request: RolloutRequest) -> None:
        tokenizer = self._need_tokenizer()
        make_workflow(request.workflow, tokenizer, request.gconfig)
        make_reward(request.reward.name, request.reward.args)
        if request.prompt.group_size > self._config.max_concurrent:
            raise ConfigError(
                f"group_size={request.prompt.group_size} of rollout {request.rollout_id!r} exceeds "
                f"executor.max_concurrent={self._config.max_concurrent}: it could never start"
            )

    async def _play_group(self, request: RolloutRequest) -> TrajectoryGroup:
        prompt = request.prompt
        tokenizer = self._need_tokenizer()
        workflow = make_workflow(request.workflow, tokenizer, request.gconfig)
        stage = Stage(
            generate=partial(generate_whole, self.generator.agenerate, tokenizer.decode),
            score=partial(self._rewards.score, request.reward),
            facilities=Facilities(NoSandbox(), NoOutbound()),
        )

        try:
            async with asyncio.TaskGroup() as siblings:
                tasks = [
                    siblings.create_task(
                        workflow.run(Sample(request.rollout_id, prompt, index), stage)
                    )
                    for index in range(prompt.group_size)
                ]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        rows = tuple(row for task in tasks for row in task.result())
        return TrajectoryGroup(request.rollout_id, prompt.group_id, rows)

    def _need_tokenizer(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise WorkflowError("this server has no tokenizer.json, so it plays no workflows")
        return self._tokenizer
