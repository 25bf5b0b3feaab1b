"""Sessions, through which an agent of any kind is run."""

from __future__ import annotations

from pydantic import Field, FiniteFloat

from headway.contracts.config.base import ComponentConfig, Config, Identifier, JsonObject
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.http.rollouts import RolloutState
from headway.contracts.types import DEFAULT_CONSUMER, VersionBounds


class SessionRequest(Config):
    """`POST /v1/sessions`: a rollout whose turns are made by a client of this service.

    Answered when the rollout is running, so it may take as long as capacity takes; idempotent by
    `rollout_id`. The client then uses `openai_url` or `anthropic_url` with `api_key`.
    """

    rollout_id: Identifier
    consumer: Identifier = DEFAULT_CONSUMER
    group_id: Identifier | None = None
    """Siblings of one task share it; None takes the rollout id."""
    data: JsonObject = {}
    """Data of the row, for the reward."""
    reward: ComponentConfig | None = None
    """Scores the session when it ends without a reward of its own."""
    gconfig: SamplingConfig = SamplingConfig()
    """Bounds and defaults of every request in the session."""
    args: JsonObject = {}
    """Arguments of the `session` workflow."""
    versions: VersionBounds = VersionBounds()
    sampling_mask: bool = False
    """As in a rollout's request; logprobs that the client is given are then under the mask, too."""
    routed_experts: bool = False
    """As in a rollout's request."""
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
    """Reward of the whole session; None has the submitted reward score the last answer."""
    turn_rewards: dict[int, FiniteFloat] = Field({}, max_length=65536)
    """Rewards by turn, counted from 0 in the order of the answers (`metadata.turn` of each)."""
    details: JsonObject = {}
    failed: str | None = Field(None, min_length=1, max_length=4096)
    """The agent broke: the rollout is recorded as failed with this reason."""


class SessionEndResponse(Config):
    rollout_id: str
    state: RolloutState
