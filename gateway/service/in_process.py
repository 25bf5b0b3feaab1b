"""`InProcessEngine`: the inference contract over a service in this process, on its own loop thread."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from gateway.consumers.consumers import Publisher
from gateway.service.app import OpenService
from gateway.service.service import RolloutService
from gateway.service.views import score_view
from headway.contracts.codec import decode_groups
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.engines import SCORE_TIMEOUT_S
from headway.contracts.errors import BackendError, WaitTimeout
from headway.contracts.http.consumers import ConsumerRequest
from headway.contracts.http.rewards import AnswerToScore
from headway.contracts.http.rollouts import WaitRequest
from headway.contracts.types import (
    DEFAULT_CONSUMER,
    ConsumerSpec,
    FinetuneSpec,
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    RewardResult,
    RolloutHandle,
    RolloutRequest,
    TrajectoryBatch,
    WeightUpdateMeta,
)
from headway.runtime.inference_client import POLL_S
from headway.runtime.scores import settle_score

T = TypeVar("T")


class InProcessEngine:
    """Runs a `RolloutService` on a background event loop; the calls of a trainer block on it."""

    def __init__(self, open_service: OpenService) -> None:
        self._open_service = open_service
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rollout-loop", daemon=True
        )
        self._context: AbstractAsyncContextManager[RolloutService] | None = None
        self._service: RolloutService | None = None
        self._consumer = DEFAULT_CONSUMER
        self._publisher: Publisher | None = None

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Start the loop and open the service; `addr` is for remote engines."""
        self._thread.start()
        self._context = self._open_service()
        self._service = self._run(self._context.__aenter__())

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        return await asyncio.wrap_future(self._schedule(self._running.generator.agenerate(req)))

    def attach(self, spec: ConsumerSpec) -> None:
        attachment = self._run(self._running.attach(ConsumerRequest.of(spec)))
        self._consumer = spec.consumer
        self._publisher = Publisher(spec.consumer, attachment.term)

    def detach(self) -> None:
        self._run(self._running.detach(self._consumer))
        self._consumer = DEFAULT_CONSUMER
        self._publisher = None

    def submit(self, requests: Sequence[RolloutRequest]) -> list[RolloutHandle]:
        new = self._run(self._running.submit(requests))
        return [RolloutHandle(r.rollout_id, n) for r, n in zip(requests, new, strict=True)]

    def wait(
        self, count: int, timeout: float, version: PolicyVersion | None = None
    ) -> TrajectoryBatch:
        return self._wait(count, None, timeout, version)

    def consumed(self, rollout_ids: Sequence[str], step: int, checkpoint_step: int) -> None:
        self._run(self._running.consumed(rollout_ids, step, checkpoint_step, self._term))

    def rollout(self, requests: Sequence[RolloutRequest], timeout: float) -> TrajectoryBatch:
        self.submit(requests)
        return self._wait(len(requests), tuple(r.rollout_id for r in requests), timeout)

    def score(
        self,
        reward: ComponentConfig,
        answers: Sequence[AnswerToScore],
        timeout: float = SCORE_TIMEOUT_S,
        failed_score: float | None = None,
    ) -> list[RewardResult]:
        work = self._schedule(self._running.batch_scorer.score(reward, answers))
        try:
            judged = work.result(timeout)
        except TimeoutError as error:
            work.cancel()
            raise WaitTimeout(
                f"not all of {len(answers)} answers were scored after {timeout:g} s"
            ) from error
        return [
            settle_score(score_view(each), place, failed_score) for place, each in enumerate(judged)
        ]

    def update_weights(
        self, meta: WeightUpdateMeta, policy: UpdatePolicy | None = None
    ) -> Future[PolicyVersion]:
        return self._schedule(self._running.updates.update(meta, policy, self._publisher))

    def cancel_update(self, version: PolicyVersion, reason: str) -> PolicyVersion:
        return self._run(self._running.updates.cancel(version, reason, self._publisher))

    def destroy(self) -> None:
        """Close the service and end the loop thread."""
        if self._context is not None:
            self._run(self._context.__aexit__(None, None, None))
            self._context = self._service = None
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(
        self,
        count: int,
        rollout_ids: tuple[str, ...] | None,
        timeout: float,
        version: PolicyVersion | None = None,
    ) -> TrajectoryBatch:
        delivery_id, num_ready, left = uuid.uuid4().hex, 0, timeout
        while True:
            poll_s = min(POLL_S, max(0.0, left))
            request = WaitRequest(
                delivery_id=delivery_id,
                count=count,
                timeout_s=poll_s,
                consumer=self._consumer,
                rollout_ids=rollout_ids,
                term=self._term,
                version=version,
            )
            payloads, num_ready = self._run(self._running.wait(request))
            if payloads is not None:
                return TrajectoryBatch(
                    tuple(g for payload in payloads for g in decode_groups(payload))
                )
            left -= poll_s
            if left <= 0:
                raise WaitTimeout(
                    f"{num_ready} of {count} prompt groups were ready after {timeout:g} s"
                )

    @property
    def _term(self) -> int:
        return 0 if self._publisher is None else self._publisher.term

    @property
    def _running(self) -> RolloutService:
        if self._service is None:
            raise BackendError("the engine is not initialized; call initialize() first")
        return self._service

    def _schedule(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._schedule(work).result()
