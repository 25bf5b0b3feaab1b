"""The contracts of generation: what a trainer sees, and what one server runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.http.rewards import AnswerToScore
from headway.contracts.http.servers import ServerStatus
from headway.contracts.types import (
    ConsumerSpec,
    FinetuneSpec,
    LLMDelta,
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    RewardResult,
    RolloutHandle,
    RolloutRequest,
    TrajectoryBatch,
    WeightUpdateMeta,
)

SCORE_TIMEOUT_S = 600.0
OnDelta = Callable[[LLMDelta], None]
"""Called on the caller's event loop with what each step added."""


@runtime_checkable
class InferenceEngine(Protocol):
    """Rollouts and generation, in this process, on one server or on a fleet: all look alike.

    `submit`, `wait` and `rollout` are for a synchronous caller (a trainer); `agenerate` is for
    code on an event loop. `wait` counts prompt groups.
    """

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Connect, and wait until the other side is ready."""

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """Generate one sequence."""

    def attach(self, spec: ConsumerSpec) -> None:
        """Declare the consumer; what it had received but not kept is given out again."""

    def detach(self) -> None:
        """End the consumer: what it has not consumed is cancelled."""

    def submit(self, requests: Sequence[RolloutRequest]) -> list[RolloutHandle]:
        """Queue prompt groups; idempotent by `rollout_id`."""

    def wait(
        self, count: int, timeout: float, version: PolicyVersion | None = None
    ) -> TrajectoryBatch:
        """Block until `count` groups of the attached consumer are finished, oldest first.

        Args:
            timeout: seconds.
            version: of the weights that will learn from the batch. They may be ahead of what serves: what
                is too stale for them is dropped.
        Raises:
            WaitTimeout: fewer were finished within `timeout` seconds.
            NotEnoughWork: fewer of the attached consumer's groups are outstanding; submit more.
            ErrorBudgetExceeded: too many rollouts failed.
        """

    def consumed(self, rollout_ids: Sequence[str], step: int, checkpoint_step: int) -> None:
        """Record that a step trained on these groups; idempotent.

        Raises:
            Fenced: a newer incarnation of this consumer has attached, and trains on them.
        """

    def rollout(self, requests: Sequence[RolloutRequest], timeout: float) -> TrajectoryBatch:
        """Submit these groups and wait for exactly them."""

    def score(
        self,
        reward: ComponentConfig,
        answers: Sequence[AnswerToScore],
        timeout: float = SCORE_TIMEOUT_S,
        failed_score: float | None = None,
    ) -> list[RewardResult]:
        """Score answers with a registered reward, outside of any rollout.

        An outage never becomes a score.

        Args:
            timeout: seconds for all of them.
            failed_score: of an answer whose verifier raised or hung, or whose row is wrong; its
                details then hold the `error`. None raises.
        Raises:
            RewardError, DataError: an answer could not be scored.
            RewardOutage: nor could it later.
            UnknownName, ConfigError: the reward cannot be made, or cannot score there.
            WaitTimeout: not all were scored in time.
        """

    def update_weights(
        self, meta: WeightUpdateMeta, policy: UpdatePolicy | None = None
    ) -> Future[PolicyVersion]:
        """Make a version the one that samples; the future ends when it is committed.

        It may be called before the version is complete: servers then stage what is there and wait
        for the rest, until `cancel_update`.

        Args:
            meta: what is published, newer than everything that was.
            policy: effect on running sequences; None takes each server's own.
        Raises:
            SyncError: too few servers could stage it, or it was given up; the old version serves on.
            Fenced: a newer incarnation of this consumer has attached.
            Conflict: another consumer is attached.
            StaleVersion: the number is used up.
        """

    def cancel_update(self, version: PolicyVersion, reason: str) -> PolicyVersion:
        """Give up a version that `update_weights` announced; returns the one that serves.

        One that is committed already goes on serving.
        """

    def destroy(self) -> None:
        """Close connections and threads."""


class WeightUpdater(Protocol):
    """Changes the version that samples, on one server or on a fleet."""

    @property
    def version(self) -> PolicyVersion:
        """The committed version."""

    async def update_weights(
        self, meta: WeightUpdateMeta, policy: UpdatePolicy | None = None
    ) -> PolicyVersion:
        """Commit a published version; `policy` as for `InferenceEngine.update_weights`.

        Cancelling the call gives the version up, unless its commit has begun.

        Returns:
            The version that serves; an older one while that is pinned.
        Raises:
            SyncError: the version was refused; the old one goes on serving.
        """

    async def cancel_update(self, version: PolicyVersion) -> None:
        """Forget a version that its publisher gave up, unless a server has verified it."""


class Generator(Protocol):
    """The asynchronous core that a rollout service runs on: one backend, or a fleet."""

    @property
    def weights(self) -> WeightUpdater:
        """The part that changes the version."""

    @property
    def version(self) -> PolicyVersion:
        """The committed version."""

    @property
    def sampled_version(self) -> PolicyVersion:
        """The version of a sequence that starts now: the committed one, once servers swapped to it."""

    @property
    def head(self) -> PolicyVersion:
        """The newest published version; after a rollback, `version` is older."""

    def has(self, version: PolicyVersion) -> bool:
        """True if requests for exactly this version can be sampled: it serves, or is reserved."""

    @property
    def updates_in_flight(self) -> int:
        """Committed updates during which at least one sequence was being generated."""

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled so far; never falls, also when a server goes."""

    def statuses(self) -> list[ServerStatus]:
        """The servers behind this generator."""

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """Generate one sequence.

        Raises:
            BackendError: the server failed; the request may be tried elsewhere.
            RequestTooLong: the request can never fit.
        """

    async def aclose(self) -> None:
        """Stop; requests in flight fail with `BackendError`."""
