"""A sample whose turns a client runs: an agent, through a session.

Without arguments the workflow opens a session and waits for a client to run and end it
(`POST /v1/sessions` submits such a rollout). With `agent_url` it calls the agent: the body is an
`AgentCall`, the answer an `AgentAnswer`, that is the session's end, unless the agent says that it goes
on and will end the session itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import BaseModel, Field, ValidationError

from gateway.components.shared_services import Outbound
from gateway.rewards.base import Answer
from gateway.sessions.chat import Chat
from gateway.sessions.session import Session
from gateway.trajectories.sample import Sample
from gateway.workflows.base import RolloutContext, SessionOpener
from headway.contracts.config.base import Config
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import BackendError, ConfigError, WorkflowError
from headway.contracts.http.sessions import SessionEndRequest, SessionResponse
from headway.contracts.types import Message, RewardResult, Trajectory
from headway.runtime.offload import offload
from headway.runtime.outages import ServiceUnreachable
from headway.text.tokenizer import TextTokenizer


class SessionArgs(Config):
    agent_url: str | None = Field(None, pattern=r"^https?://[^\s]+$", max_length=2048)
    """URL of the agent; `outbound.allow` must name it. None waits for a client to open the session."""
    agent_timeout_s: float = Field(60.0, gt=0.0)
    """Seconds for the agent's answer; `outbound.timeout_s` bounds it. An agent that takes longer answers
    `{"goes_on": true}` and ends the session itself."""


class AgentCall(Config):
    """Request to an agent."""

    session: SessionResponse
    sample_index: int
    text: str | None
    """The prompt, if it is a text."""
    messages: tuple[Message, ...] | None
    """The prompt, if it is a chat."""
    data: dict[str, Any]


class AgentAnswer(SessionEndRequest):
    """Response of an agent."""

    goes_on: bool = False
    """It has only begun, and will end the session itself."""


class SessionWorkflow:
    """`Workflow`: open a session, wait for its end, score it."""

    version: ClassVar[str] = "1"
    Args: ClassVar[type[BaseModel]] = SessionArgs

    def __init__(
        self, tokenizer: TextTokenizer, gconfig: SamplingConfig, args: SessionArgs
    ) -> None:
        self._tokenizer = tokenizer
        self._gconfig = gconfig
        self._args = args

    async def run(self, sample: Sample, context: RolloutContext) -> Sequence[Trajectory]:
        if context.sessions is None:
            raise ConfigError("this service keeps no sessions; submit to a gateway")
        play = partial(self._play, sample, context, context.sessions)
        if self._args.agent_url is None:
            return await play()
        return await context.services.outbound.outages.call(self._args.agent_url, play)

    async def _play(
        self, sample: Sample, context: RolloutContext, sessions: SessionOpener
    ) -> Sequence[Trajectory]:
        """Open a session of its own for each call of the agent: one that was lost may still run.

        Raises:
            ServiceUnreachable: the agent is away.
        """
        chat = Chat(self._tokenizer, self._gconfig, context.generate)
        async with sessions.open(sample, chat) as session:
            if self._args.agent_url is None:
                end = await session.until_end()
            else:
                url, call = self._args.agent_url, sessions.describe(session)
                end = await self._call(session, url, call, context.services.outbound)
            if end.failed is not None:
                raise WorkflowError(f"the agent failed: {end.failed}")
            return session.trajectories(await self._judge(session, end, context), end)

    async def _call(
        self, session: Session, url: str, place: SessionResponse, outbound: Outbound
    ) -> SessionEndRequest:
        """Call the agent; it may end the session itself before it answers.

        Raises:
            ServiceUnreachable: it is away.
            BackendError: it was lost after its first turn, maybe because of what it was told.
        """
        prompt = session.sample.prompt
        call = AgentCall(
            session=place,
            sample_index=session.sample.index,
            text=prompt.text,
            messages=prompt.messages,
            data=prompt.data,
        )
        body = call.model_dump(mode="json")
        calling = asyncio.ensure_future(outbound.post_once(url, body, self._args.agent_timeout_s))
        ending = asyncio.ensure_future(session.until_end())
        try:
            await asyncio.wait((calling, ending), return_when=asyncio.FIRST_COMPLETED)
            if not session.is_over:
                answer = _read(await calling, url)
                if not answer.goes_on:
                    session.end(SessionEndRequest(**answer.model_dump(exclude={"goes_on"})))
            return await ending
        except ServiceUnreachable as error:
            if session.history.nodes:
                raise BackendError(f"the agent was lost in mid-session: {error}") from error
            raise
        finally:
            calling.cancel()
            ending.cancel()

    async def _judge(
        self, session: Session, end: SessionEndRequest, context: RolloutContext
    ) -> RewardResult:
        """Return the client's reward, or else the submitted reward of the last answer."""
        if end.reward is not None:
            return RewardResult(end.reward, end.details)
        last = session.history.nodes[-1]
        completion = last.response.output_tokens
        prompt_ids = last.ids()[: -len(completion) or None]
        prompt = session.sample.prompt
        shown = await offload(len(prompt_ids), self._tokenizer.decode, prompt_ids)
        result = await context.score(
            Answer(
                prompt=shown,
                completion=last.seen[-1]["content"],
                data=prompt.data,
                prompt_ids=prompt_ids,
                completion_ids=completion,
                messages=[message.model_dump() for message in prompt.messages or ()],
            )
        )
        return RewardResult(result.score, {**result.details, **end.details}, result.verdict)


def _read(answer: Any, url: str) -> AgentAnswer:
    try:
        return AgentAnswer.model_validate({} if answer is None else answer)
    except ValidationError as error:
        raise WorkflowError(
            f"{url} answered {str(answer)[:200]!r}, which ends no session: {error}"
        ) from error
