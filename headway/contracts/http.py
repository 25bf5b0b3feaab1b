"""Every path, request and response: the only place where a URL is spelled.

Control is JSON; trajectories travel as `codec` payloads. Bodies that fail raise the classes of
`errors`. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, StringConstraints

from headway.contracts.config.base import Config, JsonObject, PartConfig
from headway.contracts.config.gateway import Role
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.types import (
    Identifier,
    PolicyVersion,
    RolloutRequest,
    StopReason,
    Verdict,
    VersionBounds,
)

HEALTH = "/health"
METRICS = "/metrics"
STATUS = "/v1/status"
GENERATE = "/v1/generate"
GENERATE_STREAM = "/v1/generate/stream"
GENERATION_ABORT = "/v1/generation/abort"
GENERATION_PAUSE = "/v1/generation/pause"
GENERATION_RESUME = "/v1/generation/resume"
GENERATION_FLUSH = "/v1/generation/flush"
ROLLOUTS = "/v1/rollouts"
ROLLOUTS_WAIT = "/v1/rollouts/wait"
ROLLOUTS_CONSUMED = "/v1/rollouts/consumed"
ROLLOUTS_CANCEL = "/v1/rollouts/cancel"
ROLLOUTS_STREAM = "/v1/rollouts/stream"
ROLLOUT = "/v1/rollouts/{rollout_id}"
WORKFLOWS = "/v1/workflows"
REWARDS = "/v1/rewards"
FILTERS = "/v1/filters"
TOOLS = "/v1/tools"
SESSIONS = "/v1/sessions"
SESSION = "/v1/sessions/{session_id}"
SESSION_END = "/v1/sessions/{session_id}/end"
SESSION_OPENAI = "/v1/sessions/{session_id}/openai/v1"
"""Base URL of an OpenAI client: `/chat/completions` and `/responses` below it."""
SESSION_ANTHROPIC = "/v1/sessions/{session_id}/anthropic"
"""Base URL of an Anthropic client: `/v1/messages` below it."""
SESSION_PATHS = f"{SESSIONS}/"
"""What lies below asks for the key of its session, and for no token of the service."""
SCALE = "/v1/scale"
SERVERS_DRAIN = "/v1/servers/drain"
LEDGER_REQUEUE = "/v1/ledger/requeue"
UI = "/ui"
UI_FILE = "/ui/{name}"
DASHBOARD = "/v1/dashboard"
CONSUMER = "/v1/consumer"
LEDGER = "/v1/ledger"
WEIGHTS = "/v1/weights"
WEIGHTS_PREPARE = "/v1/weights/prepare"
WEIGHTS_COMMIT = "/v1/weights/commit"
WEIGHTS_ABORT = "/v1/weights/abort"
WEIGHTS_PIN = "/v1/weights/pin"
WEIGHTS_ROLLBACK = "/v1/weights/rollback"
WEIGHTS_HELD = "/v1/weights/held/{version}/{blob}"
"""What a server holds, laid out as a version directory: peers fetch from `held_root`."""
SERVERS = "/v1/servers"
MODELS = "/v1/models"
MODEL = "/v1/models/{model}"
COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
# SGLang's, for clients that were written for it.
SGLANG_GENERATE = "/generate"
SGLANG_HEALTH = "/health_generate"
SGLANG_READY = "/ready"
SGLANG_PING = "/ping"
SGLANG_MODEL = "/model_info"
SGLANG_MODEL_OLD = "/get_model_info"
SGLANG_SERVER = "/server_info"
SGLANG_SERVER_OLD = "/get_server_info"
SGLANG_LOADS = "/v1/loads"
SGLANG_PAUSE = "/pause_generation"
SGLANG_CONTINUE = "/continue_generation"
SGLANG_FLUSH = "/flush_cache"
SGLANG_ABORT = "/abort_request"
SGLANG_UPDATE_DISK = "/update_weights_from_disk"
SGLANG_GROUP_INIT = "/init_weights_update_group"
SGLANG_GROUP_DESTROY = "/destroy_weights_update_group"
SGLANG_UPDATE_GROUP = "/update_weights_from_distributed"
SGLANG_UPDATE_BEGIN = "/begin_weight_update"
SGLANG_UPDATE_END = "/end_weight_update"
SGLANG_RELABEL = "/update_weight_version"
SGLANG_WEIGHTS = "/get_weights_by_name"
SGLANG_CHECKER = "/weights_checker"
SGLANG_TOKENIZE = "/tokenize"
SGLANG_DETOKENIZE = "/detokenize"

MAX_COUNT = 2**53
"""Whole numbers below are the same to every reader of JSON."""

OPEN_PATHS = (HEALTH, SGLANG_PING, SGLANG_READY, UI)
"""Answered without a token: probes hold no secrets, nor does the dashboard's page, which asks for one."""
OPEN_PREFIXES = (SESSION_PATHS, f"{UI}/")
"""What lies below is answered without a token of the service."""

OPENAPI = "/openapi.json"
OPENAPI_PAGES = ("/docs", "/docs/oauth2-redirect", "/redoc")

_ROUTES: Mapping[Role, tuple[tuple[str, ...], ...]] = {
    "submit": (
        ("GET", METRICS, STATUS, SCALE, LEDGER, ROLLOUTS, ROLLOUT, WEIGHTS, DASHBOARD),
        ("GET", WORKFLOWS, REWARDS, FILTERS, TOOLS),
        ("POST", GENERATE, GENERATE_STREAM, ROLLOUTS, SESSIONS),
        ("GET", MODELS, MODEL, OPENAPI, *OPENAPI_PAGES),
        ("POST", COMPLETIONS, CHAT_COMPLETIONS),
        ("POST", SGLANG_GENERATE, SGLANG_TOKENIZE, SGLANG_DETOKENIZE),
        ("PUT", SGLANG_GENERATE),
        ("GET", SGLANG_HEALTH, SGLANG_MODEL, SGLANG_MODEL_OLD, SGLANG_LOADS),
        ("GET", SGLANG_SERVER, SGLANG_SERVER_OLD),
    ),
    "consume": (
        ("POST", ROLLOUTS_WAIT, ROLLOUTS_CONSUMED, ROLLOUTS_CANCEL, CONSUMER, WEIGHTS),
        ("DELETE", CONSUMER, WEIGHTS),
        ("GET", ROLLOUTS_STREAM, WEIGHTS_HELD),
    ),
    "server": (("POST", SERVERS),),
    "admin": (
        ("POST", SERVERS_DRAIN, LEDGER_REQUEUE, WEIGHTS_PIN, WEIGHTS_ROLLBACK),
        ("POST", WEIGHTS_PREPARE, WEIGHTS_COMMIT, WEIGHTS_ABORT),
        ("POST", GENERATION_ABORT, GENERATION_PAUSE, GENERATION_RESUME, GENERATION_FLUSH),
        ("POST", SGLANG_PAUSE, SGLANG_CONTINUE, SGLANG_FLUSH, SGLANG_ABORT),
        ("POST", SGLANG_UPDATE_DISK, SGLANG_UPDATE_GROUP, SGLANG_RELABEL),
        ("POST", SGLANG_GROUP_INIT, SGLANG_GROUP_DESTROY),
        ("POST", SGLANG_UPDATE_BEGIN, SGLANG_UPDATE_END),
        ("POST", SGLANG_WEIGHTS, SGLANG_CHECKER),
        ("GET", SGLANG_WEIGHTS, SGLANG_FLUSH),
    ),
}
ACCESS: Mapping[str, Role] = {
    f"{method} {path}": role
    for role, rows in _ROUTES.items()
    for method, *paths in rows
    for path in paths
}
"""`METHOD path` -> the role that it asks for. What is not here asks for `admin`."""
ROUTINE = frozenset({f"POST {SERVERS}", f"POST {ROLLOUTS_WAIT}"})
"""Sent over and over by our own processes: no line of the audit log each."""

REQUEST_ID_HEADER = "x-request-id"
READY_HEADER = "x-headway-ready"
"""On an empty `wait` answer (204): how many finished groups could have been given out."""

ServerState = Literal["joining", "ready", "fenced", "quarantined", "draining", "lost"]
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
PauseMode = Literal["abort", "in_place", "retract"]
"""What a pause does to running sequences: end them with the tokens so far, freeze them with their KV
cache, or send them back to the queue without it (SGLang's words)."""


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
    consumer: Identifier = "default"
    """Take this consumer's oldest submissions."""
    rollout_ids: tuple[Identifier, ...] | None = Field(None, max_length=65536)
    """Wait for exactly these instead, whoever submitted them."""
    format: ResultFormat = "safetensors"
    """`safetensors` answers with `codec` columns, `json` with a `BatchView`."""
    term: int = Field(0, ge=0)
    """What `POST /v1/consumer` answered: an older incarnation of a consumer is refused. 0 is unknown."""


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


class GroupView(Config):
    """A finished prompt group in JSON."""

    rollout_id: str
    group_id: str
    trajectories: list[TrajectoryView]


class BatchView(Config):
    """What `wait` answers in JSON."""

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
"""Of a `RolloutView`: `summary` is without the result, and never reads it."""


class RolloutView(Config):
    """`GET /v1/rollouts/{rollout_id}`: everything that is known of one rollout."""

    summary: RolloutSummary
    request: RolloutRequest
    events: list[EventView]
    group: GroupView | None
    """The result, while it is kept; None under `view=summary`."""


class PartView(Config):
    """A registered workflow, reward, filter or tool."""

    name: str
    version: str | None
    summary: str
    """First line of its documentation."""
    args_schema: dict[str, Any]
    """JSON schema of its arguments."""


class PartList(Config):
    """`GET /v1/workflows`, `/v1/rewards`, `/v1/filters`, `/v1/tools`."""

    parts: list[PartView]


class RequeueRequest(Config):
    """`POST /v1/ledger/requeue`: play failed rollouts once more."""

    rollout_ids: tuple[Identifier, ...] = Field(min_length=1, max_length=65536)


class RequeueResponse(Config):
    requeued: int


class DrainRequest(Config):
    """`POST /v1/servers/drain`: a server takes nothing new; what runs there goes on elsewhere."""

    server_id: Identifier
    drain: bool = True
    """False ends the drain: the server takes traffic again."""


class ScaleResponse(Config):
    """`GET /v1/scale`: how many generation servers the work asks for."""

    ready: int
    """Servers that take traffic."""
    wanted: int
    """Servers that would keep the queue short; never more than staleness lets work."""
    reason: str
    queue_wait_s: float | None
    """Estimated seconds until what waits now has been started; None before a rate is known."""
    kv_usage: float
    """Share of the key-value cache in use, mean over ready servers."""
    headroom: int | None
    """Trajectories that staleness lets start beyond those in play; None without a bound."""


class SessionRequest(Config):
    """`POST /v1/sessions`: a rollout whose turns are made by a client of this service.

    Answered when the rollout is in play, so it may take as long as capacity takes; idempotent by
    `rollout_id`. The client then uses `openai_url` or `anthropic_url` with `api_key`.
    """

    rollout_id: Identifier
    consumer: Identifier = "default"
    group_id: Identifier | None = None
    """Siblings of one task share it; None takes the rollout id."""
    data: JsonObject = {}
    """For the reward."""
    reward: PartConfig | None = None
    """Scores the session when it ends without a reward of its own."""
    gconfig: SamplingConfig = SamplingConfig()
    """Bounds and defaults of every request in the session."""
    args: JsonObject = {}
    """Of the `session` workflow."""
    versions: VersionBounds = VersionBounds()
    timeout_s: float = Field(60.0, ge=0.0, le=300.0)
    """Seconds to wait for capacity before 429."""


class SessionResponse(Config):
    session_id: str
    rollout_id: str
    api_key: str
    openai_url: str
    anthropic_url: str
    end_url: str
    """Takes the `SessionEndRequest`, with the same key."""
    expires_in_s: float
    """The session fails unless it ends before that."""


class SessionEndRequest(Config):
    """`POST /v1/sessions/{session_id}/end`, with the session's key; idempotent."""

    reward: FiniteFloat | None = None
    """Of the whole session; None has the submitted reward judge the last answer."""
    turn_rewards: dict[int, FiniteFloat] = Field({}, max_length=65536)
    """By turn, counted from 0 in the order of the answers (`metadata.turn` of each)."""
    details: JsonObject = {}
    failed: str | None = Field(None, min_length=1, max_length=4096)
    """The agent broke: the rollout is recorded as failed with this reason."""


class SessionEndResponse(Config):
    rollout_id: str
    state: RolloutState


class ConsumedRequest(Config):
    """`POST /v1/rollouts/consumed`."""

    rollout_ids: tuple[Identifier, ...] = Field(max_length=65536)
    step: int = Field(ge=0, lt=MAX_COUNT)
    checkpoint_step: int = Field(ge=-1, lt=MAX_COUNT)
    """Consumption up to this step is safe in a checkpoint: payloads may be forgotten."""
    term: int = Field(0, ge=0)
    """As of `WaitRequest`."""


class ConsumerRequest(Config):
    """`POST /v1/consumer`: see `ConsumerSpec`."""

    consumer: Identifier
    batch_size: int = Field(ge=1, lt=MAX_COUNT)
    max_staleness: int = Field(ge=0, lt=MAX_COUNT)
    step: int = Field(ge=-1, lt=MAX_COUNT)
    version: PolicyVersion = Field(ge=0)


class ConsumerResponse(Config):
    given_back: int
    """Groups that a former incarnation had received but not kept."""
    version: PolicyVersion
    """Committed version on the serving side."""
    term: int
    """Number of this attachment: what the consumer waits for, consumes and publishes carries it, and an
    older incarnation of the same consumer is refused."""


class DetachRequest(Config):
    """`DELETE /v1/consumer`: what the consumer has not consumed is cancelled, attached or not."""

    consumer: Identifier


class DetachResponse(Config):
    cancelled: int
    """Trajectories that were waiting, in play or unconsumed."""


def held_root(version: PolicyVersion) -> str:
    """The path below which a server serves the blobs of a version that it holds."""
    return WEIGHTS_HELD.format(version=version, blob="").rstrip("/")


WeightPath = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


class WeightUpdateRequest(Config):
    """`POST /v1/weights`: make a published version the one that samples.

    Answered when it is committed; sent again, it is answered without work. It may be sent before the
    version is complete: servers then stage what is there and wait for the rest.
    """

    version: PolicyVersion = Field(ge=0)
    path: WeightPath
    policy: UpdatePolicy | None = None
    """What the swap does to running sequences; None takes each server's `update_policy`."""
    publisher: Identifier | None = None
    """The attached consumer who publishes; needed while one is attached."""
    term: int = Field(0, ge=0, lt=MAX_COUNT)
    """What `POST /v1/consumer` answered; an older incarnation of the publisher is refused."""


class WeightCancelRequest(Config):
    """`DELETE /v1/weights`: the publisher gives up a version that it announced."""

    version: PolicyVersion = Field(ge=0)
    publisher: Identifier | None = None
    term: int = Field(0, ge=0, lt=MAX_COUNT)
    reason: str = Field("", max_length=4096)


class Seat(Config):
    """See `types.GroupSeat`."""

    rank: int = Field(ge=1, lt=MAX_COUNT)
    world_size: int = Field(ge=2, lt=MAX_COUNT)


class WeightPrepareRequest(Config):
    """`POST /v1/weights/prepare`: stage a version while generation goes on.

    `epoch` numbers the publications of a gateway, rollbacks too. A server obeys the highest epoch that
    it has heard of; whoever comes with an older one gets `fenced`.
    """

    epoch: int = Field(ge=0, lt=MAX_COUNT)
    version: PolicyVersion = Field(ge=0)
    path: WeightPath
    digest: str | None = None
    """What the version must turn out to be."""
    fallbacks: tuple[WeightPath, ...] = Field((), max_length=64)
    seat: Seat | None = None
    """For a process group."""
    timeout_s: float = Field(300.0, gt=0.0)
    """Staging is given up after this long, and what was staged is dropped if no commit follows within
    it."""


class WeightPrepareResponse(Config):
    version: PolicyVersion
    digest: str
    """Of what was staged; empty if it cannot be known."""


class WeightCommitRequest(Config):
    """`POST /v1/weights/commit`."""

    epoch: int = Field(ge=0, lt=MAX_COUNT)
    version: PolicyVersion = Field(ge=0)
    policy: UpdatePolicy | None = None
    """See `WeightUpdateRequest`."""


class WeightAbortRequest(Config):
    """`POST /v1/weights/abort`: forget what this epoch staged, or still stages."""

    epoch: int = Field(ge=0, lt=MAX_COUNT)
    version: PolicyVersion = Field(ge=0)


class WeightUpdateResponse(Config):
    version: PolicyVersion
    """The version that serves."""
    running: int = Field(0, ge=0, lt=MAX_COUNT)
    """Sequences that were being generated at the moment of the swap."""
    digest: str = ""
    """Of the version that serves; empty if it is not known."""


class WeightPinRequest(Config):
    """`POST /v1/weights/pin`: serve this version, and hold it while others are published."""

    version: PolicyVersion | None = Field(None, ge=0)
    """A kept version; None ends the pin and goes on with the newest."""


class WeightRollbackRequest(Config):
    """`POST /v1/weights/rollback`: go back to a kept version, until the next one is published."""

    version: PolicyVersion = Field(ge=0)


class WeightRecord(Config):
    """One published version, as the gateway remembers it."""

    version: PolicyVersion
    path: str
    digest: str | None = None


class WeightStatus(Config):
    """`GET /v1/weights`."""

    committed: WeightRecord | None
    """What serves; None before the first publication."""
    head: PolicyVersion
    """Newest published version; numbers up to it are used up."""
    epoch: int
    """Of the last transaction."""
    pinned: PolicyVersion | None
    publishing: PolicyVersion | None
    """A version whose transaction is under way."""
    kept: list[WeightRecord]
    """Where earlier versions lay; a rollback finds out whether they still do."""


class GenerationAbortRequest(Config):
    """`POST /v1/generation/abort`: the requests end with the tokens so far."""

    rid: str | None = Field(None, min_length=1, max_length=128)
    """One request; None ends all."""


class GenerationPauseRequest(Config):
    """`POST /v1/generation/pause`: decoding stops; new requests wait until it goes on."""

    mode: PauseMode = "in_place"


class FlushResponse(Config):
    flushed: bool
    """False if sequences were running; nothing was dropped."""


class ServerReport(Config):
    """`POST /v1/servers`: registration and heartbeat of a generation server."""

    server_id: Identifier
    url: str = Field(pattern=r"^https?://[^\s/]+$", max_length=512)
    version: PolicyVersion = Field(ge=0)
    running: int = Field(0, ge=0, lt=MAX_COUNT)
    queued: int = Field(0, ge=0, lt=MAX_COUNT)
    generated_tokens: int = Field(0, ge=0, lt=MAX_COUNT)
    busy_s: float = Field(0.0, ge=0.0)
    """Seconds in which the engine had work, since the server started."""
    uptime_s: float = Field(0.0, ge=0.0)
    digest: str = ""
    """Of the weights that serve; empty if it is not known."""
    kv_usage: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the key-value cache in use."""
    preemptions: int = Field(0, ge=0, lt=MAX_COUNT)
    """Running sequences that lost their cache for want of memory, since the server started."""
    max_running: int = Field(0, ge=0, lt=MAX_COUNT)
    """Sequences that it decodes at once, at most; 0 if that is not known."""
    num_ranks: int = Field(1, ge=1, lt=MAX_COUNT)
    """Seats that this server takes in a process group: its engine's ranks."""
    draining: bool = False
    """It is shutting down: what runs may end, nothing new is taken."""


class ServerReportResponse(Config):
    state: ServerState
    version: PolicyVersion
    """Committed version of the fleet."""


class ServerStatus(ServerReport):
    state: ServerState


class LedgerCounts(Config):
    """Trajectories by state of their rollout; the states are disjoint and cover all."""

    submitted: int = 0
    queued: int = 0
    leased: int = 0
    ready: int = 0
    delivered: int = 0
    consumed: int = 0
    failed: int = 0
    filtered: int = 0
    stale: int = 0
    cancelled: int = 0


class LedgerAudit(Config):
    """The ledger's own proof, recomputed from its append-only event log."""

    counts: LedgerCounts
    lost: int
    """Trajectories whose events end in no known state, or whose state contradicts their events."""
    duplicated: int
    """Consumptions of a rollout beyond the first that was not given back."""
    max_staleness: int
    """Largest staleness at delivery among consumed trajectories, in versions."""
    requeues: int
    """Attempts that ended without a result and were tried again."""


class StatusResponse(Config):
    """`GET /v1/status`."""

    version: PolicyVersion
    """The version that serves."""
    head: PolicyVersion = 0
    """Newest published version: numbers up to it are used up; above `version` after a rollback."""
    running: int
    """Trajectories being played."""
    capacity: int
    """Trajectories that may start now."""
    max_staleness: int | None
    counts: LedgerCounts
    servers: list[ServerStatus] = []
    updates: int = 0
    """Committed weight updates."""
    updates_in_flight: int = 0
    """Committed updates during which at least one sequence was being generated."""
    generated_tokens: int = 0
    last_failures: list[str] = []


class HistoryPoint(Config):
    """What one gateway saw in the seconds up to a moment."""

    at: float
    """Seconds since the epoch."""
    version: PolicyVersion
    queued: int
    leased: int
    ready: int
    delivered: int
    consumed: int
    """Trajectories by state, as `LedgerCounts`."""
    generated_tokens: int
    """Since the gateway started."""
    num_rewards: int = 0
    """Trajectories that this gateway finished since the point before."""
    mean_reward: float | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    staleness: dict[int, int] = {}
    """At delivery by this gateway since the point before: versions -> trajectories."""


class DashboardResponse(Config):
    """`GET /v1/dashboard`: what the page at `/ui` shows of the service; cheap."""

    service_version: str
    """Of this package."""
    now: float
    """Seconds since the epoch, by the gateway's clock."""
    interval_s: float
    """Between the points of the history."""
    status: StatusResponse
    weights: WeightStatus
    scale: ScaleResponse
    sessions_open: int
    """In this gateway."""
    history: list[HistoryPoint]
    """Oldest first; those after `after`, if that was asked for."""


class HealthResponse(Config):
    status: Literal["ok"] = "ok"
