"""Turns run against a service of the user's own: a game, an environment, a judge.

After every turn the service is sent what the policy said, and answers whether the sample goes on. The
address must be covered by `outbound.allow` of the gateway's config. What is sent (POST, JSON):

    {"type": "object", "properties": {
        "rollout_id": {"type": "string"}, "group_id": {"type": "string"},
        "sample_index": {"type": "integer", "minimum": 0},
        "attempt_id": {"type": "string", "description": "of one run of a sample; the next has another"},
        "turn_id": {"type": "string", "description": "the same for every attempt to send one turn"},
        "turn": {"type": "integer", "minimum": 0},
        "is_last": {"type": "boolean", "description": "the answer must be end"},
        "prompt": {"type": "string", "description": "the rendered prompt"},
        "completion": {"type": ["string", "null"],
            "description": "what this turn sampled; null: the row had no room for it"},
        "messages": {"type": "array", "description": "the chat before this turn: role, content"},
        "data": {"type": "object", "description": "of the prompt's row"},
        "stop_reason": {"enum": ["stop", "length"]},
        "policy_version": {"type": ["integer", "null"], "description": "of the last token"}}}

What is answered, with status 200:

    {"oneOf": [
        {"properties": {"action": {"const": "continue"},
            "messages": {"type": "array", "minItems": 1, "items": {"type": "object",
                "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
                "required": ["role", "content"], "additionalProperties": false}},
            "reward": {"type": ["number", "null"], "description": "of this turn alone"}},
         "required": ["action", "messages"], "additionalProperties": false},
        {"properties": {"action": {"const": "end"},
            "reward": {"type": ["number", "null"],
                "description": "of the sample; null has the rollout's own reward score the last turn"},
            "turn_rewards": {"type": "object", "additionalProperties": {"type": "number"},
                "description": "by turn, counted from 0"},
            "details": {"type": "object", "description": "for viewers"}},
         "required": ["action"], "additionalProperties": false}]}

The same body, with the same `turn_id`, is sent again while the service is away, for up to
`outbound.service_wait_s`. No answer in time, another status or no JSON is an outage: it is sent again,
and after `attempts` of them the rollout is run again. An answer of another form fails the rollout.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from gateway.components.shared_services import Outbound
from gateway.rewards.base import as_result
from gateway.trajectories.sample import Sample
from gateway.workflows.base import RolloutContext
from gateway.workflows.conversation import Conversation
from gateway.workflows.turn_sampler import TurnSampler
from headway.contracts.config.base import Config
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import BackendError, WorkflowError
from headway.contracts.types import (
    LLMResponse,
    Message,
    PolicyVersion,
    Prompt,
    RewardResult,
    StopReason,
    Trajectory,
)
from headway.runtime.offload import offload, size_of
from headway.runtime.outbound import shown
from headway.text.tokenizer import TextTokenizer

PAUSE_S = 0.2
MAX_PAUSE_S = 5.0


class CallbackArgs(Config):
    url: str = Field(pattern=r"^https?://\S+$", max_length=2048)
    """URL of the service."""
    max_turns: int = Field(8, ge=1, le=1024)
    """Maximum number of turns; the service is told which one is the last."""
    timeout_s: float = Field(30.0, gt=0.0)
    """Seconds for one answer; `outbound.timeout_s` bounds it too."""
    attempts: int = Field(4, ge=1, le=64)
    """Number of times that one turn is sent to the service while it does not answer."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of the whole row, prompt included; None leaves the bound to the server's
    context."""
    template_args: dict[str, Any] = {}
    """Further variables of the chat template (`enable_thinking`, ...)."""


class TurnCall(Config):
    """Request to the service; see the module's schema."""

    rollout_id: str
    group_id: str
    sample_index: int
    attempt_id: str
    turn_id: str
    turn: int
    is_last: bool
    prompt: str
    completion: str | None
    messages: list[dict[str, Any]]
    data: dict[str, Any]
    stop_reason: StopReason
    policy_version: PolicyVersion | None


class Continue(Config):
    """The sample goes on."""

    action: Literal["continue"]
    messages: tuple[Message, ...] = Field(min_length=1, max_length=256)
    reward: FiniteFloat | None = None


class End(Config):
    """The sample has ended."""

    action: Literal["end"]
    reward: FiniteFloat | None = None
    turn_rewards: dict[int, FiniteFloat] = {}
    details: dict[str, Any] = {}


_ANSWER: TypeAdapter[Continue | End] = TypeAdapter(
    Annotated[Continue | End, Field(discriminator="action")]
)


class Callback:
    """The user's own service answers every turn, and gives the reward."""

    version: ClassVar[str] = "1"
    Args: ClassVar[type[BaseModel]] = CallbackArgs

    def __init__(
        self, tokenizer: TextTokenizer, gconfig: SamplingConfig, args: CallbackArgs
    ) -> None:
        self._tokenizer = tokenizer
        self._gconfig = gconfig
        self._args = args

    def opening(self, prompt: Prompt) -> list[int]:
        """See `base.HasOpening`."""
        return self._chat(prompt).opening()

    async def run(self, sample: Sample, context: RolloutContext) -> Sequence[Trajectory]:
        args = self._args
        chat = self._chat(sample.prompt)
        opening = await offload(chat.size, chat.opening)
        sampler = TurnSampler(
            self._tokenizer, self._gconfig, sample, context, opening, args.max_tokens
        )
        shown_text = await offload(len(opening), self._tokenizer.decode, opening)
        play = _Play(sample, chat, shown_text, uuid.uuid4().hex)
        shown: list[int] = []
        while True:
            response = await sampler.next_turn(shown)
            turn = len(sampler.transcript.turns) - (response is not None)
            is_last = response is None or turn == args.max_turns - 1
            completion = None if response is None else await sampler.completion()
            call = play.tell(turn, completion, response, is_last)
            answer = await self._ask(call, context.services.outbound)
            if isinstance(answer, End):
                break
            if is_last:
                raise WorkflowError(
                    f"{args.url} answered continue to turn {turn}, which had is_last; answer end there"
                )
            said = [message.model_dump() for message in answer.messages]
            sampler.transcript.annotate(-1, reward=answer.reward, messages=said)
            size = chat.size + size_of(said)
            shown = await offload(size, chat.follow, sampler.transcript.ids_of(-1), said)
        result = await self._result(sampler, answer)
        stop_reason: StopReason | None = "length" if response is None else None
        return (sampler.transcript.trajectory(sample, result, stop_reason=stop_reason),)

    def _chat(self, prompt: Prompt) -> Conversation:
        return Conversation(self._tokenizer, prompt, template_args=self._args.template_args)

    async def _ask(self, call: TurnCall, outbound: Outbound) -> Continue | End:
        """The service's answer to one turn.

        Raises:
            BackendError: it could not be reached, at any attempt.
            WorkflowError: what it answered is none.
        """
        body = call.model_dump()
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(BackendError),
            stop=stop_after_attempt(self._args.attempts),
            wait=wait_random_exponential(PAUSE_S, MAX_PAUSE_S),
            reraise=True,
        ):
            with attempt:
                given = await outbound.post(self._args.url, body, self._args.timeout_s)
        return await offload(size_of(given), self._read, call.turn, given)

    def _read(self, turn: int, given: Any) -> Continue | End:
        try:
            return _ANSWER.validate_python(given)
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, problem['loc'])) or 'answer'}: {problem['msg']}"
                for problem in error.errors(include_url=False, include_input=False)[:8]
            ]
            raise WorkflowError(
                f"{self._args.url} answered {shown(given)} to turn {turn}: {'; '.join(problems)}"
            ) from error

    async def _result(self, sampler: TurnSampler, end: End) -> RewardResult:
        """The reward of the sample, and of its turns."""
        num_turns = len(sampler.transcript.turns)
        for turn, reward in end.turn_rewards.items():
            if not 0 <= turn < num_turns:
                raise WorkflowError(
                    f"{self._args.url} answered a reward for turn {turn}; the sample has {num_turns}"
                )
            sampler.transcript.annotate(turn, reward=reward)
        if end.reward is not None:
            return as_result(self._args.url, RewardResult(end.reward, end.details))
        result = await sampler.score()
        details = {**result.details, **end.details}
        return as_result(self._args.url, RewardResult(result.score, details, result.verdict))


@dataclass(frozen=True, slots=True)
class _Play:
    """One run of a sample, as reported to the service."""

    sample: Sample
    chat: Conversation
    prompt: str
    attempt_id: str

    def tell(
        self, turn: int, completion: str | None, response: LLMResponse | None, is_last: bool
    ) -> TurnCall:
        versions = [] if response is None else response.output_versions
        return TurnCall(
            rollout_id=self.sample.rollout_id,
            group_id=self.sample.prompt.group_id,
            sample_index=self.sample.index,
            attempt_id=self.attempt_id,
            turn_id=f"{self.attempt_id}.{turn}",
            turn=turn,
            is_last=is_last,
            prompt=self.prompt,
            completion=completion,
            messages=self.chat.messages,
            data=self.sample.prompt.data,
            stop_reason="length" if response is None else response.stop_reason,
            policy_version=versions[-1] if versions else None,
        )
