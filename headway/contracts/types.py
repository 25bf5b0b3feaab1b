"""Records that cross a process boundary.

What enters from outside is a pydantic model; what only travels inside the codec is a frozen
dataclass over numpy columns. `[T]` is the length of one trajectory, prompt included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from headway.contracts.config.base import (
    ComponentConfig,
    Config,
    Identifier,
    JsonObject,
    WorkflowRef,
)
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.routed_experts import RoutedExperts
from headway.contracts.sampling_mask import SamplingMask

PolicyVersion = Annotated[int, Field(lt=2**31)]
"""+1 per publication of weights; 0 is the model that a run starts from."""

DEFAULT_CONSUMER = "default"
"""Consumer of the rollouts that name none."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopReason = Literal["stop", "length", "interrupt"]


class Message(Config):
    """One turn of a chat."""

    role: str = Field(min_length=1, max_length=64)
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _refuse_parts(cls, content: Any) -> Any:
        if not isinstance(content, list | tuple):
            return content
        kinds = {str(part.get("type")) if isinstance(part, dict) else "?" for part in content}
        raise ValueError(
            f"content is a list with parts of type {', '.join(sorted(kinds))}; workflows play text "
            "only: send the content as one string, without images or audio"
        )


class Prompt(Config):
    """Start of a prompt group: exactly one of `text`, `messages` or `input_ids`."""

    group_id: Identifier
    """Siblings of one prompt share it; advantages are computed within it."""
    group_size: int = Field(default=1, ge=1, le=1024)
    """Trajectories to sample from this prompt."""
    text: str | None = None
    """Plain text, tokenised as it is."""
    messages: tuple[Message, ...] | None = None
    """A chat, rendered with the model's chat template."""
    input_ids: tuple[TokenId, ...] | None = None
    """Token ids, used as they are."""
    data: JsonObject = {}
    """The rest of the data row, for the reward."""

    @model_validator(mode="after")
    def _check(self) -> Prompt:
        given = [
            name for name in ("text", "messages", "input_ids") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ValueError(
                f"prompt has {given or 'no content'}; give one of text, messages, input_ids"
            )
        return self


class VersionBounds(Config):
    """Bounds on the policy versions that may sample a rollout."""

    min_version: PolicyVersion | None = Field(default=None, ge=0)
    """The rollout waits until this version is committed."""
    max_version: PolicyVersion | None = Field(default=None, ge=0)
    """Once a newer one is committed, the rollout fails."""
    pin: bool = False
    """One version for all tokens of the group: a rollout that meets a swap is run again."""

    @property
    def exact(self) -> PolicyVersion | None:
        """The one version that they allow, if it is one."""
        return self.min_version if self.min_version == self.max_version else None

    @model_validator(mode="after")
    def _check(self) -> VersionBounds:
        if (
            self.min_version is not None
            and self.max_version is not None
            and self.min_version > self.max_version
        ):
            raise ValueError(
                f"min_version={self.min_version} exceeds max_version={self.max_version}"
            )
        return self


class RolloutRequest(Config):
    """One prompt group to run, idempotent by `rollout_id`."""

    rollout_id: Identifier
    consumer: Identifier = DEFAULT_CONSUMER
    """Name of the consumer that will `wait` for it; the attached consumer's rollouts are bounded in
    staleness."""
    prompt: Prompt
    workflow: WorkflowRef = WorkflowRef(name="single_turn")
    reward: ComponentConfig
    gconfig: SamplingConfig = SamplingConfig()
    filter: ComponentConfig | None = None
    """Registered filter that keeps or drops the finished group; None keeps all."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Higher is run first; equal ones in the order of submission."""
    timeout_s: float | None = Field(default=None, gt=0.0, le=30 * 86_400)
    """Seconds from submission after which the rollout fails, queued or running; None has no limit."""
    versions: VersionBounds = VersionBounds()
    sampling_mask: bool = False
    """Ask for `LLMRequest.sampling_mask` wherever sampling cuts, and store it with the trajectory."""
    routed_experts: bool = False
    """Ask for `LLMRequest.routed_experts`, and store them with the trajectory."""

    @model_validator(mode="after")
    def _check(self) -> RolloutRequest:
        if self.gconfig.max_new_tokens < 1:
            raise ValueError("gconfig.max_new_tokens=0; a rollout samples at least one token")
        return self


class LLMRequest(Config):
    """One sequence to generate."""

    rid: Identifier
    input_ids: tuple[TokenId, ...] = Field(min_length=1)
    gconfig: SamplingConfig = SamplingConfig()
    top_logprobs: int = Field(default=0, ge=0, le=64)
    """Also report this many most likely tokens at every reported position."""
    logprob_start: int | None = Field(default=None, ge=0)
    """Report the logprobs of the prompt's tokens from this position on, of the unscaled
    distribution; None reports none."""
    sampling_mask: bool = False
    """Also report which tokens `top_k`, `top_p` and `min_p` left at each position, and give the output's
    logprobs under the distribution over those alone; false gives logprobs from before the cut. Has no
    effect where `gconfig` cuts nothing. Backends that report none refuse."""
    routed_experts: bool = False
    """Also report which experts computed each token, prompt included, if the model is a mixture of
    experts. An engine that does not report them refuses."""
    adapter: Identifier | None = None
    """Name of a loaded adapter that computes beside the base; versions are then the adapter's. None takes
    the base alone."""
    version: PolicyVersion | None = Field(default=None, ge=0)
    """The version that has to serve when the request comes; a server with another one refuses it. None
    takes any."""
    metadata: dict[str, str] = {}
    """Fields for logs and routing (for example `group_id`); it never changes what is sampled."""


TopLogprobs = list[tuple[int, float]]
"""`(token id, logprob)` of the most likely tokens of one position, most likely first."""


class LLMDelta(Config):
    """Tokens that one decode step added to a request: a part of the response as it grows."""

    output_tokens: list[int]
    output_logprobs: list[float]
    version: PolicyVersion
    """Version that sampled these tokens."""
    top_logprobs: list[TopLogprobs] | None = None


class LLMResponse(Config):
    """Tokens sampled for one request, each with its logprob and the version that sampled it."""

    rid: str
    output_tokens: list[int]
    output_logprobs: list[float]
    """Logprob of each sampled token under the version that sampled it: over all tokens, or, where
    `sampling_mask` is there, over those that it holds."""
    version_runs: list[tuple[PolicyVersion, int, int]]
    """Runs `(version, from, to)` over output positions, stamped by the server at the decode step."""
    stop_reason: StopReason
    """`interrupt`: aborted; the tokens so far are valid, and a prefix to go on from."""
    stop_match: int | str | None = None
    """Token id or string that ended the sequence."""
    latency_s: float
    """Seconds from arrival at the server to the last token."""
    ttft_s: float
    """Seconds from arrival at the server to the first token."""
    top_logprobs: list[TopLogprobs] | None = None
    """Per output token, if asked for; of the distribution before the cut."""
    sampling_mask: SamplingMask | None = None
    """Tokens that could be drawn at each output position; None if it was not asked for, or nothing was
    cut."""
    routed_experts: RoutedExperts | None = None
    """Experts of every token but the last, prompt included; None if they were not asked for, or the model
    has none. An engine may report none of a request that was interrupted."""
    prompt_logprobs: list[float | None] | None = None
    """Logprobs of the prompt from `logprob_start` on, if asked for; the first token of a prompt has
    none."""
    prompt_top_logprobs: list[TopLogprobs | None] | None = None
    cached_tokens: int = Field(default=0, ge=0)
    """Prompt tokens whose keys and values were shared, not computed."""
    num_recomputes: int = Field(default=0, ge=0)
    """Times that the cache of this sequence was dropped and computed again."""

    @property
    def output_versions(self) -> list[PolicyVersion]:
        """The version of every output token, the runs expanded."""
        versions: list[PolicyVersion] = []
        for version, start, end in self.version_runs:
            versions += [version] * (end - start)
        return versions


Verdict = Literal[
    "scored",
    "accepted",
    "wrong_answer",
    "wrong_format",
    "runtime_error",
    "compile_error",
    "timeout",
    "memory",
    "output_limit",
]
"""Why a score is what it is: `scored` says no more than the number. An outage is none of these: it raises
`RewardOutage`, is tried again, and never becomes a score."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A verifier's score of one answer, with its verdict."""

    score: float
    details: dict[str, Any] = field(default_factory=dict)
    """Details for logs and viewers; values without a form in JSON arrive as text."""
    verdict: Verdict = "scored"


@dataclass(frozen=True, slots=True)
class Turn:
    """One stretch of a trajectory that the policy sampled."""

    start: int
    """Position of its first token in the row."""
    end: int
    """Position behind its last token."""
    stop_reason: StopReason
    reward: float | None = None
    """Reward of this turn alone; None where only the trajectory is scored."""
    note: dict[str, Any] = field(default_factory=dict)
    """Details for viewers: the tool calls of this turn, what came back, its messages."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The record of one rollout: prompt and response tokens in one row."""

    rollout_id: str
    group_id: str
    sample_index: int
    input_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T] true where the policy sampled the token
    logprobs: NDArray[np.float32]  # [T] behaviour logprobs (`sampling_mask`), 0 off loss_mask
    versions: NDArray[np.int32]  # [T] behaviour versions, -1 where loss_mask is false
    reward: float
    stop_reason: StopReason
    verdict: Verdict = "scored"
    details: dict[str, Any] = field(default_factory=dict)
    """Further details that the verifier reported, for viewers."""
    turns: tuple[Turn, ...] = ()
    """The sampled stretches in order; empty where there is one and nothing to report of it."""
    branch: int = 0
    """Counts the histories of one sample: a session whose history was changed forks."""
    sampling_mask: SamplingMask | None = None
    """Mask over [T]: tokens that could be drawn at each position, and that `logprobs` are over. None if
    nothing was cut, or the mask was not asked for: `logprobs` are then over all tokens."""
    routed_experts: RoutedExperts | None = None
    """Experts of the first tokens, up to the last that the policy read; None if they were not asked for,
    or the model has none."""

    @property
    def trajectory_id(self) -> str:
        """Unique over a run."""
        name = f"{self.rollout_id}/{self.sample_index}"
        return f"{name}.{self.branch}" if self.branch else name

    @property
    def oldest_version(self) -> PolicyVersion:
        """The oldest version among the sampled tokens; -1 if none was sampled."""
        sampled = self.versions[self.loss_mask]
        return int(sampled.min()) if sampled.size else -1

    @property
    def num_tokens(self) -> int:
        """T, prompt included."""
        return int(self.input_ids.shape[0])


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """All siblings of one prompt, in the order of `sample_index`."""

    rollout_id: str
    group_id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float]:
        """One per sample: the branches of a sample share its reward."""
        return list({row.sample_index: row.reward for row in self.trajectories}.values())

    @property
    def mean_reward(self) -> float:
        """Over the samples."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def oldest_version(self) -> PolicyVersion:
        """The oldest version among all sampled tokens of the group."""
        return min(trajectory.oldest_version for trajectory in self.trajectories)


@dataclass(frozen=True, slots=True)
class TrajectoryBatch:
    """Result of `wait`: whole groups, oldest submission first."""

    groups: tuple[TrajectoryGroup, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, group by group."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def rollout_ids(self) -> list[str]:
        """One id per group."""
        return [group.rollout_id for group in self.groups]


@dataclass(frozen=True, slots=True)
class GroupRank:
    """One server's place in a process group that brings weights."""

    epoch: int
    """The publication that the group was made for; part of the group's name."""
    rank: int
    """Rank of the server's first process; the trainer is rank 0."""
    world_size: int


@dataclass(frozen=True, slots=True)
class WeightUpdateMeta:
    """Location of a published version, or the process group over which it flows."""

    version: PolicyVersion
    path: str
    """Directory, or URL whose scheme names the transport (`weight_sync.channel`)."""
    digest: str | None = None
    """Digest that the version must turn out to have; None takes the one in its manifest."""
    fallbacks: tuple[str, ...] = ()
    """Other places that hold the same version, tried in this order when the first one fails."""
    group_rank: GroupRank | None = None
    """Rank of the receiver in the process group, if the version flows through one."""
    label: str | None = None
    """Text by which its publisher names it."""


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A consumer of trajectories, and how far behind they may be."""

    consumer: str
    batch_size: int
    """Trajectories consumed per version (B)."""
    max_staleness: int
    """Versions between sampling and consumption, at most (η); 0 is synchronous."""
    step: int
    """Last step whose consumption the consumer's checkpoint holds; later ones are given back."""
    version: PolicyVersion
    """Version that the consumer starts or resumes with."""


@dataclass(frozen=True, slots=True)
class FinetuneSpec:
    """Size of a run, for learning-rate schedules."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int

    @property
    def total_train_steps(self) -> int:
        """Whole batches over all epochs."""
        return self.total_train_epochs * (self.dataset_size // self.train_batch_size)


@dataclass(frozen=True, slots=True)
class RolloutHandle:
    """Receipt of a submission; `is_new` is false for an id that was known."""

    rollout_id: str
    is_new: bool
