"""`RemoteInferenceEngine`: the inference contract over HTTP, for trainers and tools.

Every call is idempotent on the server (by rollout id, delivery id, step or version), so all of them
are retried with jitter until the service was out of reach for `connect_timeout_s`: a gateway may
restart under a trainer. Where several gateways share a ledger, whoever does not answer is followed by the
next. One thread may call the blocking methods at a time; `agenerate` belongs to the
caller's event loop.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import aiohttp
import httpx
from pydantic import BaseModel
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential
from tenacity.stop import stop_base

from headway.contracts.codec import decode_groups
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import BackendError, ServiceError, WaitTimeout
from headway.contracts.http import paths
from headway.contracts.http.consumers import (
    ConsumerRequest,
    ConsumerResponse,
    DetachRequest,
    DetachResponse,
)
from headway.contracts.http.ledger import LedgerAudit
from headway.contracts.http.parts import PartList, PartView
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
    ConsumerSpec,
    FinetuneSpec,
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    RolloutHandle,
    RolloutRequest,
    TrajectoryBatch,
    WeightUpdateMeta,
)
from headway.runtime.secret import authorization
from headway.runtime.server_calls import error_of, post_generate
from headway.runtime.tls import client_context

POLL_S = 20.0
SUBMIT_CHUNK = 256
DEFAULT_CONSUMER = "default"
MAX_REASON_CHARS = 4096
WORKED_ON_S = 10.0
"""An attempt that lasted longer than it takes to connect had reached the service."""


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
        self._urls = deque(each.rstrip("/") for each in urls)
        """The one that is asked comes first."""
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._headers = authorization(token)
        self._client = httpx.Client(
            timeout=httpx.Timeout(request_timeout_s, connect=5.0),
            headers=self._headers,
            verify=client_context(),
        )
        self._updates = ThreadPoolExecutor(1, thread_name_prefix="weight-update")
        self._session: aiohttp.ClientSession | None = None
        self._consumer = DEFAULT_CONSUMER
        self._publisher: str | None = None
        self._term = 0

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Wait until the service answers; `addr` replaces the URL given at construction."""
        if addr is not None:
            self._urls = deque([addr.rstrip("/")])
        self.status()

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._request_timeout_s, sock_connect=5.0)
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                headers=self._headers,
                connector=aiohttp.TCPConnector(ssl=client_context()),
            )
        return await post_generate(self._session, self._url, req)

    def attach(self, spec: ConsumerSpec) -> None:
        request = ConsumerRequest(
            consumer=spec.consumer,
            batch_size=spec.batch_size,
            max_staleness=spec.max_staleness,
            step=spec.step,
            version=spec.version,
        )
        answer = self._call("POST", paths.CONSUMER, request)
        self._consumer = self._publisher = spec.consumer
        self._term = ConsumerResponse.model_validate_json(answer.content).term

    def detach(self) -> None:
        self.detach_consumer(self._consumer)
        self._consumer = DEFAULT_CONSUMER
        self._publisher, self._term = None, 0

    def detach_consumer(self, consumer: str) -> int:
        """End a consumer by name; returns the trajectories that were cancelled."""
        answer = self._call("DELETE", paths.CONSUMER, DetachRequest(consumer=consumer))
        return DetachResponse.model_validate_json(answer.content).cancelled

    def submit(self, requests: Sequence[RolloutRequest]) -> list[RolloutHandle]:
        handles: list[RolloutHandle] = []
        for start in range(0, len(requests), SUBMIT_CHUNK):
            chunk = tuple(requests[start : start + SUBMIT_CHUNK])
            answer = self._call("POST", paths.ROLLOUTS, SubmitRequest(rollouts=chunk))
            new = SubmitResponse.model_validate_json(answer.content).new
            handles += [RolloutHandle(r.rollout_id, n) for r, n in zip(chunk, new, strict=True)]
        return handles

    def wait(self, count: int, timeout: float) -> TrajectoryBatch:
        return self._wait(count, None, timeout)

    def consumed(self, rollout_ids: Sequence[str], step: int, checkpoint_step: int) -> None:
        request = ConsumedRequest(
            rollout_ids=tuple(rollout_ids),
            step=step,
            checkpoint_step=checkpoint_step,
            term=self._term,
        )
        self._call("POST", paths.ROLLOUTS_CONSUMED, request)

    def rollout(self, requests: Sequence[RolloutRequest], timeout: float) -> TrajectoryBatch:
        self.submit(requests)
        return self._wait(len(requests), tuple(r.rollout_id for r in requests), timeout)

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
        answer = self._call("DELETE", paths.WEIGHTS, request)
        return WeightUpdateResponse.model_validate_json(answer.content).version

    def weights(self) -> WeightStatus:
        """What a gateway serves and keeps, and whether a publication is under way.

        Raises:
            NotFound: one server alone keeps no versions.
        """
        return WeightStatus.model_validate_json(self._call("GET", paths.WEIGHTS).content)

    def pin(self, version: PolicyVersion | None) -> WeightStatus:
        """Serve a kept version and hold it while others are published; None ends that."""
        answer = self._call("POST", paths.WEIGHTS_PIN, WeightPinRequest(version=version))
        return WeightStatus.model_validate_json(answer.content)

    def rollback(self, version: PolicyVersion) -> WeightStatus:
        """Serve a kept version until the next one is published."""
        request = WeightRollbackRequest(version=version)
        answer = self._call("POST", paths.WEIGHTS_ROLLBACK, request)
        return WeightStatus.model_validate_json(answer.content)

    def reserve(self, wanted: WeightReservation) -> ReservationStatus:
        """Let some servers of a gateway stay at a version; to be repeated every few seconds.

        Raises:
            NotFound: it is not kept, or this is one server alone.
            Conflict: another name has a reservation.
        """
        answer = self._call("POST", paths.WEIGHTS_RESERVATION, wanted)
        return ReservationStatus.model_validate_json(answer.content)

    def end_reservation(self, name: str) -> None:
        """Let its servers go on with the newest version."""
        self._call("DELETE", paths.WEIGHTS_RESERVATION, ReservationEndRequest(name=name))

    def take(
        self,
        delivery_id: str,
        rollout_ids: Sequence[str],
        timeout: float,
        version: PolicyVersion | None = None,
    ) -> TrajectoryBatch | None:
        """Exactly these groups, or None while some are still in play after `timeout` seconds.

        Args:
            delivery_id: the same one is answered with the same groups, also after a crash.
            rollout_ids: of whichever consumer.
            timeout: at most 60.
            version: that their staleness counts from; None is the newest.
        Raises:
            Fruitless: some of them ended without a result.
        """
        request = WaitRequest(
            delivery_id=delivery_id,
            count=len(rollout_ids),
            timeout_s=timeout,
            rollout_ids=tuple(rollout_ids),
            version=version,
        )
        answer = self._call("POST", paths.ROLLOUTS_WAIT, request)
        if answer.status_code != 200:
            return None
        return TrajectoryBatch(decode_groups(answer.content))

    def cancel(self, rollout_ids: Sequence[str], reason: str = "cancelled by its submitter") -> int:
        """End rollouts that are not consumed yet; returns the groups that this call ended."""
        request = CancelRequest(rollout_ids=tuple(rollout_ids), reason=reason)
        answer = self._call("POST", paths.ROLLOUTS_CANCEL, request)
        return CancelResponse.model_validate_json(answer.content).cancelled

    def get(self, rollout_id: str) -> RolloutView:
        """Everything that is known of one rollout.

        Raises:
            NotFound: it was never submitted, or is forgotten.
        """
        path = paths.ROLLOUT.format(rollout_id=rollout_id)
        return RolloutView.model_validate_json(self._call("GET", path).content)

    def workflows(self) -> list[PartView]:
        """What can be submitted, with the schemas of the arguments."""
        return PartList.model_validate_json(self._call("GET", paths.WORKFLOWS).content).parts

    def rewards(self) -> list[PartView]:
        """What can score, with the schemas of the arguments."""
        return PartList.model_validate_json(self._call("GET", paths.REWARDS).content).parts

    def filters(self) -> list[PartView]:
        """What can drop a finished group, with the schemas of the arguments."""
        return PartList.model_validate_json(self._call("GET", paths.FILTERS).content).parts

    def tools(self) -> list[PartView]:
        """What `tool_use` can offer a policy, with the schemas of what each is made with."""
        return PartList.model_validate_json(self._call("GET", paths.TOOLS).content).parts

    def scale(self) -> ScaleResponse:
        """How many generation servers a gateway asks for."""
        return ScaleResponse.model_validate_json(self._call("GET", paths.SCALE).content)

    def drain_server(self, server_id: str, drain: bool = True) -> None:
        """Take traffic from a server, or give it back."""
        self._call("POST", paths.SERVERS_DRAIN, DrainRequest(server_id=server_id, drain=drain))

    def status(self) -> StatusResponse:
        """Version, capacity, ledger counts and servers."""
        return StatusResponse.model_validate_json(self._call("GET", paths.STATUS).content)

    def audit(self) -> LedgerAudit:
        """The ledger's own proof that nothing was lost or consumed twice."""
        return LedgerAudit.model_validate_json(self._call("GET", paths.LEDGER).content)

    def destroy(self) -> None:
        """Close the connections; an `agenerate` session is closed by `aclose` on its own loop."""
        self._updates.shutdown(wait=True)
        self._client.close()

    async def aclose(self) -> None:
        """Close what `agenerate` opened."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def _url(self) -> str:
        return self._urls[0]

    def _update_weights(self, request: WeightUpdateRequest) -> PolicyVersion:
        answer = self._call("POST", paths.WEIGHTS, request)
        return WeightUpdateResponse.model_validate_json(answer.content).version

    def _wait(
        self, count: int, rollout_ids: tuple[str, ...] | None, timeout: float
    ) -> TrajectoryBatch:
        deadline = time.monotonic() + timeout
        delivery_id = uuid.uuid4().hex
        while True:
            left = deadline - time.monotonic()
            request = WaitRequest(
                delivery_id=delivery_id,
                count=count,
                timeout_s=max(0.0, min(POLL_S, left)),
                consumer=self._consumer,
                rollout_ids=rollout_ids,
                term=self._term,
            )
            answer = self._call("POST", paths.ROLLOUTS_WAIT, request)
            if answer.status_code == 200:
                return TrajectoryBatch(decode_groups(answer.content))
            if time.monotonic() >= deadline:
                ready = answer.headers.get(paths.READY_HEADER, "0")
                raise WaitTimeout(
                    f"{ready} of {count} prompt groups were ready after {timeout:g} s"
                )

    def _call(self, method: str, path: str, body: BaseModel | None = None) -> httpx.Response:
        retrying = Retrying(
            retry=retry_if_exception(_is_retryable),
            wait=wait_random_exponential(multiplier=0.1, max=2.0),
            stop=_Outage(self._connect_timeout_s),
            reraise=True,
        )
        try:
            return retrying(self._call_once, method, path, body)
        except httpx.TransportError as error:
            raise BackendError(
                f"{self._url}{path} did not answer for {self._connect_timeout_s:g} s "
                f"({type(error).__name__}: {error}); is the service running?"
            ) from error

    def _call_once(self, method: str, path: str, body: BaseModel | None) -> httpx.Response:
        content = None if body is None else body.model_dump_json()
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            answer = self._client.request(
                method, self._url + path, content=content, headers=headers
            )
        except httpx.TransportError:
            self._urls.rotate(-1)
            raise
        if answer.is_error:
            raise error_of(answer.status_code, answer.content, f"{self._url}{path}")
        return answer


class _Outage(stop_base):
    """Ends retries after `timeout_s`; one that broke off a long request begins anew."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._attempt_began = self._since = time.monotonic()

    def __call__(self, retry_state: RetryCallState) -> bool:
        now = time.monotonic()
        if now - self._attempt_began > WORKED_ON_S:
            self._since = now
        # The next attempt begins after a pause, which is short beside WORKED_ON_S.
        self._attempt_began = now
        return now - self._since > self._timeout_s


def _is_retryable(error: BaseException) -> bool:
    return isinstance(error, httpx.TransportError) or (
        isinstance(error, ServiceError) and error.retryable
    )
