"""`RemoteInferenceEngine`: the inference contract over HTTP, for trainers and tools.

Every call is idempotent on the server (by rollout id, delivery id, step or version), so all of them
are retried with jitter until the service was out of reach for `connect_timeout_s`: a gateway may
restart under a trainer. Where several gateways share a ledger, one that does not answer is followed
by the next. One thread may call the blocking methods at a time; `agenerate` belongs to the
caller's event loop.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from headway.contracts.codec import decode_groups
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.engines import SCORE_TIMEOUT_S
from headway.contracts.errors import BackendError, ServiceError, WaitTimeout
from headway.contracts.http import paths
from headway.contracts.http.components import ComponentList, ComponentView
from headway.contracts.http.consumers import (
    ConsumerRequest,
    ConsumerResponse,
    DetachRequest,
    DetachResponse,
)
from headway.contracts.http.ledger import LedgerAudit
from headway.contracts.http.rewards import (
    AnswerToScore,
    ScoreRequest,
    ScoreResponse,
)
from headway.contracts.http.rollouts import (
    CancelRequest,
    CancelResponse,
    ConsumedRequest,
    RolloutView,
    SubmitRequest,
    SubmitResponse,
    WaitRequest,
)
from headway.contracts.http.servers import DrainRequest, ScaleResponse
from headway.contracts.http.status import StatusResponse
from headway.contracts.http.weights import (
    ReservationEndRequest,
    ReservationStatus,
    WeightCancelRequest,
    WeightPinRequest,
    WeightReservation,
    WeightRollbackRequest,
    WeightStatus,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
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
from headway.runtime.connections import Connections
from headway.runtime.scores import chunks_of, settle_score
from headway.runtime.server_calls import generation_headers, post_generate
from headway.runtime.service_calls import CONNECT_S, KEEP_ALIVE_S, ServiceCalls
from headway.runtime.tls import client_context

log = logging.getLogger(__name__)

POLL_S = 20.0
MAX_CONNECTIONS = 100
SUBMIT_CHUNK = 256
MAX_REASON_CHARS = 4096


class RemoteInferenceEngine:
    """`InferenceEngine` behind a URL: a gateway or one generation server alone."""

    def __init__(
        self,
        url: str | Sequence[str],
        connect_timeout_s: float = 60.0,
        request_timeout_s: float = 600.0,
        token: str | None = None,
    ) -> None:
        urls = [url] if isinstance(url, str) else list(url)
        self._calls = ServiceCalls(urls, connect_timeout_s, request_timeout_s, token)
        self._token = token
        self._updates = ThreadPoolExecutor(1, thread_name_prefix="weight-update")
        self._connections: Connections | None = None
        self._consumer = DEFAULT_CONSUMER
        self._publisher: str | None = None
        self._term = 0

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Wait until the service answers; `addr` replaces the URL given at construction."""
        if addr is not None:
            self._calls.urls = deque([addr.rstrip("/")])
        self.status()

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        if self._connections is None:
            self._connections = Connections(
                client_context(),
                generation_headers(self._token),
                MAX_CONNECTIONS,
                CONNECT_S,
                KEEP_ALIVE_S,
            )
        return await post_generate(
            self._connections, self._calls.url, req, self._calls.request_timeout_s
        )

    def attach(self, spec: ConsumerSpec) -> None:
        answer = self._calls.call("POST", paths.CONSUMER, ConsumerRequest.of(spec))
        self._consumer = self._publisher = spec.consumer
        attached = ConsumerResponse.from_response(answer.content)
        self._term = attached.term
        if attached.version > spec.version:
            log.warning(
                f"servers have version {attached.version}, newer than version {spec.version} of consumer "
                f"{spec.consumer!r}, maybe of another run: rollouts come from those weights until it "
                "publishes its own"
            )

    def detach(self) -> None:
        self.detach_consumer(self._consumer)
        self._consumer = DEFAULT_CONSUMER
        self._publisher, self._term = None, 0

    def detach_consumer(self, consumer: str) -> int:
        """End a consumer by name; returns the trajectories that were cancelled."""
        answer = self._calls.call("DELETE", paths.CONSUMER, DetachRequest(consumer=consumer))
        return DetachResponse.from_response(answer.content).cancelled

    def submit(self, requests: Sequence[RolloutRequest]) -> list[RolloutHandle]:
        handles: list[RolloutHandle] = []
        for start in range(0, len(requests), SUBMIT_CHUNK):
            chunk = tuple(requests[start : start + SUBMIT_CHUNK])
            answer = self._calls.call("POST", paths.ROLLOUTS, SubmitRequest(rollouts=chunk))
            new = SubmitResponse.from_response(answer.content).new
            handles += [RolloutHandle(r.rollout_id, n) for r, n in zip(chunk, new, strict=True)]
        return handles

    def wait(
        self, count: int, timeout: float, version: PolicyVersion | None = None
    ) -> TrajectoryBatch:
        return self._wait(count, None, timeout, version)

    def consumed(self, rollout_ids: Sequence[str], step: int, checkpoint_step: int) -> None:
        request = ConsumedRequest(
            rollout_ids=tuple(rollout_ids),
            step=step,
            checkpoint_step=checkpoint_step,
            term=self._term,
        )
        self._calls.call("POST", paths.ROLLOUTS_CONSUMED, request)

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
        deadline = time.monotonic() + timeout
        results: list[RewardResult] = []
        for chunk in chunks_of(answers):
            request = ScoreRequest(reward=reward, answers=chunk)
            try:
                answer = self._calls.call("POST", paths.REWARDS_SCORE, request, deadline)
            except ServiceError as error:
                if error.retryable and time.monotonic() >= deadline:
                    raise WaitTimeout(
                        f"{len(results)} of {len(answers)} answers were scored after {timeout:g} s; "
                        f"the last attempt: {error.message}"
                    ) from error
                raise
            views = ScoreResponse.from_response(answer.content).results
            if len(views) != len(chunk):
                raise BackendError(
                    f"{self._calls.url}{paths.REWARDS_SCORE} judged {len(views)} of {len(chunk)} answers"
                )
            for view in views:
                results.append(settle_score(view, len(results), failed_score))
        return results

    def update_weights(
        self, meta: WeightUpdateMeta, policy: UpdatePolicy | None = None
    ) -> Future[PolicyVersion]:
        request = WeightUpdateRequest(
            version=meta.version,
            path=meta.path,
            policy=policy,
            publisher=self._publisher,
            term=self._term,
        )
        return self._updates.submit(self._update_weights, request)

    def cancel_update(self, version: PolicyVersion, reason: str) -> PolicyVersion:
        request = WeightCancelRequest(
            version=version,
            publisher=self._publisher,
            term=self._term,
            reason=reason[:MAX_REASON_CHARS],
        )
        answer = self._calls.call("DELETE", paths.WEIGHTS, request)
        return WeightUpdateResponse.from_response(answer.content).version

    def weights(self) -> WeightStatus:
        """Return the versions that a gateway serves and keeps, and whether a publication is under
        way.

        Raises:
            NotFound: one server alone keeps no versions.
        """
        return WeightStatus.from_response(self._calls.call("GET", paths.WEIGHTS).content)

    def pin(self, version: PolicyVersion | None) -> WeightStatus:
        """Serve a kept version and hold it while others are published; None ends that."""
        answer = self._calls.call("POST", paths.WEIGHTS_PIN, WeightPinRequest(version=version))
        return WeightStatus.from_response(answer.content)

    def rollback(self, version: PolicyVersion) -> WeightStatus:
        """Serve a kept version until the next one is published."""
        request = WeightRollbackRequest(version=version)
        answer = self._calls.call("POST", paths.WEIGHTS_ROLLBACK, request)
        return WeightStatus.from_response(answer.content)

    def reserve(self, wanted: WeightReservation) -> ReservationStatus:
        """Let some servers of a gateway stay at a version; to be repeated every few seconds.

        Raises:
            NotFound: it is not kept, or this is one server alone.
            Conflict: another name has a reservation.
        """
        answer = self._calls.call("POST", paths.WEIGHTS_RESERVATION, wanted)
        return ReservationStatus.from_response(answer.content)

    def end_reservation(self, name: str) -> None:
        """Let its servers go on with the newest version."""
        self._calls.call("DELETE", paths.WEIGHTS_RESERVATION, ReservationEndRequest(name=name))

    def take(
        self,
        delivery_id: str,
        rollout_ids: Sequence[str],
        timeout: float,
        version: PolicyVersion | None = None,
    ) -> TrajectoryBatch | None:
        """Exactly these groups, or None while some are still running after `timeout` seconds.

        Args:
            delivery_id: the same one is answered with the same groups, also after a crash.
            rollout_ids: ids of any consumer's rollouts.
            timeout: at most 60.
            version: that their staleness counts from; None is the newest.
        Raises:
            RolloutsFailed: some of them ended without a result.
        """
        request = WaitRequest(
            delivery_id=delivery_id,
            count=len(rollout_ids),
            timeout_s=timeout,
            rollout_ids=tuple(rollout_ids),
            version=version,
        )
        answer = self._calls.call("POST", paths.ROLLOUTS_WAIT, request)
        if answer.status != 200:
            return None
        return TrajectoryBatch(decode_groups(answer.content))

    def cancel(self, rollout_ids: Sequence[str], reason: str = "cancelled by its submitter") -> int:
        """End rollouts that are not consumed yet; returns the groups that this call ended."""
        request = CancelRequest(rollout_ids=tuple(rollout_ids), reason=reason)
        answer = self._calls.call("POST", paths.ROLLOUTS_CANCEL, request)
        return CancelResponse.from_response(answer.content).cancelled

    def get(self, rollout_id: str) -> RolloutView:
        """Everything that is known of one rollout.

        Raises:
            NotFound: it was never submitted, or is forgotten.
        """
        path = paths.ROLLOUT.format(rollout_id=rollout_id)
        return RolloutView.from_response(self._calls.call("GET", path).content)

    def workflows(self) -> list[ComponentView]:
        """Return the workflows that can be submitted, with the schemas of the arguments."""
        return ComponentList.from_response(self._calls.call("GET", paths.WORKFLOWS).content).parts

    def rewards(self) -> list[ComponentView]:
        """Return the rewards, with the schemas of the arguments."""
        return ComponentList.from_response(self._calls.call("GET", paths.REWARDS).content).parts

    def filters(self) -> list[ComponentView]:
        """Return the filters that can drop a finished group, with the schemas of the arguments."""
        return ComponentList.from_response(self._calls.call("GET", paths.FILTERS).content).parts

    def tools(self) -> list[ComponentView]:
        """Return the tools that `tool_use` can offer a policy, with the schemas of their
        arguments."""
        return ComponentList.from_response(self._calls.call("GET", paths.TOOLS).content).parts

    def scale(self) -> ScaleResponse:
        """Return the number of generation servers that a gateway asks for."""
        return ScaleResponse.from_response(self._calls.call("GET", paths.SCALE).content)

    def drain_server(self, server_id: str, drain: bool = True) -> None:
        """Take traffic from a server, or give it back."""
        self._calls.call(
            "POST", paths.SERVERS_DRAIN, DrainRequest(server_id=server_id, drain=drain)
        )

    def status(self) -> StatusResponse:
        """Version, capacity, ledger counts and servers."""
        return StatusResponse.from_response(self._calls.call("GET", paths.STATUS).content)

    def audit(self) -> LedgerAudit:
        """Return the ledger's own audit: that nothing was lost or consumed twice."""
        return LedgerAudit.from_response(self._calls.call("GET", paths.LEDGER).content)

    def destroy(self) -> None:
        """Close the connections; those of `agenerate` are closed by `aclose` on its own loop.

        What is under way is asked no more than once: an update whose service is gone ends here.
        """
        self._calls.end()
        self._updates.shutdown(wait=True)
        self._calls.connections.close()

    async def aclose(self) -> None:
        """Close what `agenerate` opened."""
        if self._connections is not None:
            await self._connections.aclose()
            self._connections = None

    def _update_weights(self, request: WeightUpdateRequest) -> PolicyVersion:
        answer = self._calls.call("POST", paths.WEIGHTS, request)
        return WeightUpdateResponse.from_response(answer.content).version

    def _wait(
        self,
        count: int,
        rollout_ids: tuple[str, ...] | None,
        timeout: float,
        version: PolicyVersion | None = None,
    ) -> TrajectoryBatch:
        deadline = time.monotonic() + timeout
        delivery_id = uuid.uuid4().hex
        tell_s = POLL_S
        while True:
            left = deadline - time.monotonic()
            request = WaitRequest(
                delivery_id=delivery_id,
                count=count,
                timeout_s=max(0.0, min(POLL_S, left)),
                consumer=self._consumer,
                rollout_ids=rollout_ids,
                term=self._term,
                version=version,
            )
            answer = self._calls.call("POST", paths.ROLLOUTS_WAIT, request)
            if answer.status == 200:
                return TrajectoryBatch(decode_groups(answer.content))
            ready = answer.headers.get(paths.READY_HEADER.lower().encode(), b"0").decode()
            if (left := deadline - time.monotonic()) <= 0:
                raise WaitTimeout(
                    f"{ready} of {count} prompt groups were ready after {timeout:g} s"
                )
            if (waited_s := timeout - left) >= tell_s:
                tell_s = 2 * waited_s
                log.info(
                    "waiting at %s, %.0f s: %s of %d prompt groups are ready",
                    *(self._calls.url, waited_s, ready, count),
                )
