"""Rollouts over HTTP: submitted, waited for, looked at, consumed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from headway.contracts.config.base import MAX_COUNT, Config, Identifier
from headway.contracts.routed_experts import RoutedExperts
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import (
    DEFAULT_CONSUMER,
    PolicyVersion,
    RolloutRequest,
    StopReason,
    Verdict,
)

RolloutState = Literal[
    "queued",
    "leased",
    "ready",
    "delivered",
    "consumed",
    "failed",
    "filtered",
    "stale",
    "cancelled",
]
ResultFormat = Literal["safetensors", "json"]


class SubmitRequest(Config):
    """`POST /v1/rollouts`."""

    rollouts: tuple[RolloutRequest, ...] = Field(min_length=1, max_length=4096)


class SubmitResponse(Config):
    new: list[bool]
    """Per rollout: false where the id was known with the same content."""


class WaitRequest(Config):
    """`POST /v1/rollouts/wait`: answers with a codec payload, or 204 after `timeout_s`."""

    delivery_id: Identifier
    """The same id is answered with the same groups, so a lost answer can be asked for again."""
    count: int = Field(ge=1, le=65536)
    timeout_s: float = Field(20.0, ge=0.0, le=60.0)
    consumer: Identifier = DEFAULT_CONSUMER
    """Take this consumer's oldest submissions."""
    rollout_ids: tuple[Identifier, ...] | None = Field(None, max_length=65536)
    """Wait for exactly these instead, no matter who submitted them."""
    format: ResultFormat = "safetensors"
    """`safetensors` answers with `codec` columns, `json` with a `BatchView`."""
    term: int = Field(0, ge=0)
    """Term that `POST /v1/consumer` returned: an older incarnation of a consumer is refused. 0 is
    unknown."""
    version: PolicyVersion | None = Field(None, ge=0)
    """Version of the weights that the batch is for. Of `rollout_ids`, staleness counts from it: an
    evaluation names the one that it is of. Else what is too stale for it is dropped, also while an older
    version serves. None takes the newest that was committed."""


class TurnView(Config):
    """See `types.Turn`."""

    start: int
    end: int
    stop_reason: StopReason
    reward: float | None
    note: dict[str, Any]


class TrajectoryView(Config):
    """A trajectory in JSON, for people and for clients without safetensors; `[T]` as in `types`."""

    trajectory_id: str
    sample_index: int
    branch: int
    input_ids: list[int]  # [T]
    loss_mask: list[bool]  # [T]
    logprobs: list[float]  # [T]
    versions: list[int]  # [T]
    tokens: list[str] | None = None
    """The text of each token; None where the service has no tokenizer. A character that several tokens
    share stands with the last of them, U+25CC with the others. [T]"""
    reward: float
    verdict: Verdict
    details: dict[str, Any]
    stop_reason: StopReason
    turns: list[TurnView]
    sampling_mask: SamplingMask | None = None
    """Tokens that could be drawn at each position, which `logprobs` are over; None: all."""
    routed_experts: RoutedExperts | None = None
    """Experts of the first tokens; None if they were not recorded."""


class GroupView(Config):
    """A finished prompt group in JSON."""

    rollout_id: str
    group_id: str
    trajectories: list[TrajectoryView]


class BatchView(Config):
    """JSON response of `wait`."""

    groups: list[GroupView]


class CancelRequest(Config):
    """`POST /v1/rollouts/cancel`: whatever is not consumed ends as `cancelled`."""

    rollout_ids: tuple[Identifier, ...] = Field(min_length=1, max_length=65536)
    reason: str = Field("cancelled by a request", min_length=1, max_length=1024)


class CancelResponse(Config):
    cancelled: int
    """Groups that this request ended; the others had ended before, or are not known."""


class RolloutSummary(Config):
    """One line of `GET /v1/rollouts`."""

    rollout_id: str
    consumer: str
    group_id: str
    group_size: int
    workflow: str
    reward: str
    state: RolloutState
    attempt: int
    submitted_at: float
    """Seconds since the epoch."""
    changed_at: float
    oldest_version: PolicyVersion | None
    staleness: int | None
    mean_reward: float | None
    step: int | None
    """The step that consumed it."""
    reason: str | None


class RolloutList(Config):
    """`GET /v1/rollouts`: newest submission first."""

    rollouts: list[RolloutSummary]
    before: str | None
    """Ask with this for the next page; None on the last."""


class EventView(Config):
    event: str
    detail: str | None
    at: float


RolloutDetail = Literal["full", "summary"]
"""Detail of a `RolloutView`: `summary` is without the result, and never reads it."""


class RolloutView(Config):
    """`GET /v1/rollouts/{rollout_id}`: everything that is known of one rollout."""

    summary: RolloutSummary
    request: RolloutRequest
    events: list[EventView]
    group: GroupView | None
    """The result, while it is kept; None under `view=summary`."""


class RequeueRequest(Config):
    """`POST /v1/ledger/requeue`: run failed rollouts once more."""

    rollout_ids: tuple[Identifier, ...] = Field(min_length=1, max_length=65536)


class RequeueResponse(Config):
    requeued: int


class ConsumedRequest(Config):
    """`POST /v1/rollouts/consumed`."""

    rollout_ids: tuple[Identifier, ...] = Field(max_length=65536)
    step: int = Field(ge=0, lt=MAX_COUNT)
    checkpoint_step: int = Field(ge=-1, lt=MAX_COUNT)
    """Consumption up to this step is safe in a checkpoint: payloads may be forgotten."""
    term: int = Field(0, ge=0)
    """Term as in `WaitRequest`."""
