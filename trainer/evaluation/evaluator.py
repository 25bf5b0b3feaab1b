"""One evaluation, from its reservation to its metrics; blocking, for a thread of its own.

Ids follow from run, step, version and row, and so do those of the deliveries: a process that resumes an
evaluation, this one or the next, submits nothing twice and gets the same results.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event

from headway.contracts.config.evaluation import EvaluationConfig
from headway.contracts.config.rollout_experiments import PolicyLearner
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import (
    BackendError,
    Conflict,
    NotFound,
    SyncError,
    WaitTimeout,
)
from headway.contracts.http.weights import WeightReservation
from headway.contracts.types import PolicyVersion, RolloutRequest, VersionBounds
from headway.runtime.inference_client import RemoteInferenceEngine
from trainer.data import PromptData
from trainer.evaluation.summary import PromptResult, describe, read_group

log = logging.getLogger(__name__)

POLL_S = 2.0
"""One look for results; the reservation is repeated before each."""
CHUNKS_IN_PLAY = 2
MAX_CHUNK = 256


@dataclass(frozen=True, slots=True)
class EvaluationTarget:
    """Version to evaluate."""

    run_id: str
    step: int
    """Steps that had been done."""
    version: PolicyVersion

    @property
    def name(self) -> str:
        """Name of its reservation; the ids of its rollouts begin with it."""
        return f"{self.run_id}.evaluation.{self.step}.v{self.version}"


class Stopped(Exception):
    """The process ends; another one may go on."""


class Evaluator:
    """Evaluates one version at a time."""

    def __init__(
        self, client: RemoteInferenceEngine, config: EvaluationConfig, experiment: PolicyLearner
    ) -> None:
        """Args:
        client: used by the evaluator alone.
        experiment: training's own, for what `config` leaves to it.
        """
        self._client = client
        self.config = config
        self._data = PromptData(config.data_over(experiment.data))
        self._sampling = config.sampling_over(experiment.sampling)
        self._reward = config.reward or experiment.rollout.reward
        self._workflow = config.workflow or experiment.rollout.workflow
        self.stopping = Event()
        """When set, the evaluation that runs is left to another process."""

    def run(self, order: EvaluationTarget) -> dict[str, float]:
        """Metrics of a version, or why there are none.

        Raises:
            ServiceError: it is missed.
            Stopped: it was left.
        """
        began = time.monotonic()
        waiting = deque(self._chunks(order))
        in_play: deque[list[RolloutRequest]] = deque()
        prompts: list[PromptResult] = []
        reservation = _Reservation(self._client, order, self.config) if self._is_fleet() else None
        while waiting or in_play:
            self._check(began)
            if reservation is not None and not reservation.repeat():
                self.stopping.wait(POLL_S)
                continue
            while waiting and len(in_play) < CHUNKS_IN_PLAY:
                self._client.submit(waiting[0])
                in_play.append(waiting.popleft())
            ids = [request.rollout_id for request in in_play[0]]
            batch = self._client.take(f"{ids[0]}.taken", ids, POLL_S, order.version)
            if batch is not None:
                prompts += [read_group(group, order.version) for group in batch.groups]
                in_play.popleft()
        if reservation is not None:
            reservation.end()
        seconds = time.monotonic() - began
        return describe(prompts, self.config.pass_score) | {"seconds": seconds}

    def settle(self, order: EvaluationTarget, is_kept: bool) -> None:
        """Its servers and rollouts are needed no more; sent again, it changes nothing.

        Args:
            is_kept: its rollouts count as consumed by its step; else all of them are cancelled.
        """
        if self._is_fleet():
            self._client.end_reservation(order.name)
        for chunk in self._chunks(order):
            ids = [request.rollout_id for request in chunk]
            if is_kept:
                self._client.consumed(ids, order.step, order.step)
            else:
                self._client.cancel(ids, "its evaluation was missed")

    def close(self) -> None:
        """Close the connections; no evaluation runs any more."""
        self._client.destroy()

    def _is_fleet(self) -> bool:
        """One server alone keeps no version but the one that serves."""
        try:
            self._client.weights()
        except NotFound:
            return False
        return True

    def _check(self, began: float) -> None:
        if self.stopping.is_set():
            raise Stopped
        if time.monotonic() - began > self.config.timeout_s:
            raise WaitTimeout(f"it was not over after timeout_s={self.config.timeout_s:g}")

    def _chunks(self, order: EvaluationTarget) -> Iterator[list[RolloutRequest]]:
        rows = range(min(len(self._data), self.config.limit or len(self._data)))
        in_play = self.config.max_concurrent // self.config.num_samples
        size = min(MAX_CHUNK, max(1, in_play // CHUNKS_IN_PLAY))
        for start in range(0, len(rows), size):
            yield [self._request(order, row) for row in rows[start : start + size]]

    def _request(self, order: EvaluationTarget, row: int) -> RolloutRequest:
        limit = self._data.max_new_tokens(row)
        sampling = self._sampling.model_dump()
        if limit is not None:
            sampling["max_new_tokens"] = limit
        return RolloutRequest(
            rollout_id=f"{order.name}.{row}",
            consumer=f"{order.run_id}.evaluation",
            prompt=self._data.prompt(row, self.config.num_samples),
            workflow=self._workflow,
            reward=self._reward,
            gconfig=SamplingConfig.model_validate(sampling),
            priority=self.config.priority,
            timeout_s=self.config.timeout_s,
            versions=VersionBounds(min_version=order.version, max_version=order.version, pin=True),
        )


class _Reservation:
    """Servers that stay at a version for as long as this is repeated."""

    def __init__(
        self, client: RemoteInferenceEngine, order: EvaluationTarget, config: EvaluationConfig
    ) -> None:
        self._client = client
        self._wait_s = config.server_wait_s
        self._served_at = time.monotonic()
        self._wanted = WeightReservation(
            name=order.name, version=order.version, servers=config.servers
        )

    def repeat(self) -> bool:
        """Renew the reservation. Return false while another one is in force.

        Raises:
            NotFound, SyncError: the version is gone.
            BackendError: no server was at the version for too long.
        """
        try:
            status = self._client.reserve(self._wanted)
        except Conflict as error:
            log.info("an evaluation waits", extra={"reason": str(error)})
            return False
        if status.num_ready:
            self._served_at = time.monotonic()
        elif status.failure is not None:
            raise SyncError(f"version {self._wanted.version} could not be kept: {status.failure}")
        elif time.monotonic() - self._served_at > self._wait_s:
            raise BackendError(
                f"no server was at version {self._wanted.version} for {self._wait_s:g} s "
                f"(reserved: {status.servers or 'none, one is left to training'}); add a server, or "
                "evaluate less"
            )
        return True

    def end(self) -> None:
        """The servers go on with the newest version."""
        self._client.end_reservation(self._wanted.name)
