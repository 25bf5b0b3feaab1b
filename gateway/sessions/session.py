"""One open session: who may enter, what it has said, and how it ends.

Any number of requests may be in flight; each is placed in the history when it comes, and recorded when
its answer is whole. One whose client goes away, or that the end of the session overtakes, is cancelled
and leaves no trace. `until_end` is awaited by the workflow; a request wakes it by `end`, by breaking the
session (what the sampler raises that no client can mend), or not at all: then it is idle too long.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import uuid
from collections.abc import Sequence

from gateway.sessions.chat import Chat, Message, TurnReply, TurnRequest
from gateway.sessions.history import HistoryTree
from gateway.trajectories.sample import Sample
from headway.contracts.config.gateway import SessionsConfig
from headway.contracts.errors import (
    BackendError,
    Conflict,
    DataError,
    QueueFull,
    RequestTimeout,
    RequestTooLong,
    ServiceError,
    SessionEnded,
    WorkflowError,
)
from headway.contracts.http.sessions import SessionEndRequest
from headway.contracts.types import LLMRequest, LLMResponse, RewardResult, Trajectory
from headway.dialects.error_shapes import InvalidField
from headway.runtime.clock import monotonic
from headway.runtime.offload import offload
from headway.text.streaming import TextStream, text_of
from headway.text.tool_calls import ToolCall, ToolCallStream

KEY_BYTES = 16
SEEDS = 2**63
HARMLESS = (BackendError, DataError, InvalidField, QueueFull, RequestTimeout, RequestTooLong)
"""Errors that a client may correct or try again; everything else that the sampler raises ends the
session."""


class Session:
    """The turns of one sample, run by a client."""

    def __init__(self, sample: Sample, chat: Chat, config: SessionsConfig) -> None:
        self.id = f"session-{uuid.uuid4().hex}"
        self.key = secrets.token_hex(KEY_BYTES)
        self.sample = sample
        self.chat = chat
        self.history = HistoryTree(chat.tokenizer)
        self.opened_at = monotonic()
        self.answers: dict[str, list[Message]] = {}
        """Conversations that a client may go on from by the id of an answer (OpenAI's responses)."""
        self._config = config
        self._num_asked = 0
        self._in_flight = 0
        self._used_at = self.opened_at
        self._over: asyncio.Future[SessionEndRequest] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
        self._why = ""

    def admits(self, key: str) -> bool:
        """True if this is the session's key, compared in constant time."""
        return hmac.compare_digest(key.encode(), self.key.encode())

    @property
    def is_over(self) -> bool:
        """True if it takes no more requests."""
        return self._over.done()

    async def run_turn(self, ask: TurnRequest) -> TurnReply:
        """Answer one request.

        Raises:
            SessionEnded: it has ended, or ends before the answer is whole.
            InvalidField: `max_turns` requests were answered.
            RequestTooLong, BackendError, ...: as the sampler.
        """
        self.check_open()
        if self._num_asked >= self._config.max_turns:
            raise InvalidField(
                f"{self._num_asked} requests were made, sessions.max_turns="
                f"{self._config.max_turns}; end the session"
            )
        number, self._num_asked = self._num_asked, self._num_asked + 1
        self._in_flight += 1
        is_answered = False
        try:
            place = await offload(ask.size, self.history.place, ask)
            response = await self._sample(self._request(place.prompt_ids, ask, number))
            text, calls = await offload(len(response.output_tokens), self._read, ask, response)
            message: Message = {"role": "assistant", "content": text}
            if calls:
                message["tool_calls"] = [call.rendered() for call in calls]
            node = self.history.add(place, message, response)
            is_answered = True
            return TurnReply(node.number, place.prompt_ids, response, text, calls, message)
        finally:
            self._num_asked -= not is_answered
            self._in_flight -= 1
            self._used_at = monotonic()

    def end(self, request: SessionEndRequest, is_judged: bool = True) -> None:
        """Take the client's last word; the same one again changes nothing.

        Args:
            is_judged: the rollout has a reward that scores where the client gives none.
        Raises:
            Conflict: it ended with another one.
            SessionEnded: it ended without one.
            InvalidField: no turn was made, or not one that is rewarded, or there is no reward.
        """
        if self._over.done() and self._over.exception() is None:
            if self._over.result() != request:
                raise Conflict("the session has ended with another reward or reason")
            return
        self.check_open()
        turns = len(self.history.nodes)
        if request.failed is None and not turns:
            raise InvalidField(
                "no turn was made: there is nothing to train on; send failed", "failed"
            )
        if request.failed is None and request.reward is None and not is_judged:
            raise InvalidField("the session was submitted without a reward; send one", "reward")
        if unknown := sorted(turn for turn in request.turn_rewards if not 0 <= turn < turns):
            raise InvalidField(
                f"turn_rewards names the turns {unknown[:8]}; {turns} were made, counted from 0",
                "turn_rewards",
            )
        self._over.set_result(request)

    async def until_end(self) -> SessionEndRequest:
        """Wait for the client's last word.

        Raises:
            WorkflowError: no request came for `idle_timeout_s`.
            ServiceError: what broke the session.
        """
        idle_s = self._config.idle_timeout_s
        while True:
            left_s = idle_s if self._in_flight else self._used_at + idle_s - monotonic()
            if left_s <= 0:
                raise WorkflowError(
                    f"no request for sessions.idle_timeout_s={idle_s:g} s; the agent never ended the "
                    "session"
                )
            await asyncio.wait((self._over,), timeout=left_s)
            if self._over.done():
                return self._over.result()

    def close(self, why: str) -> None:
        """Take no more requests; those in flight fail with this reason."""
        self._break(SessionEnded(why))
        self.history = HistoryTree(
            self.chat.tokenizer
        )  # a session is remembered longer than its tokens
        self.answers.clear()
        self._closed.set()

    async def until_closed(self) -> None:
        """Wait until the workflow is done with it."""
        await self._closed.wait()

    def check_open(self) -> None:
        """Raises `SessionEnded` if it takes no more requests."""
        if self.is_over:
            raise SessionEnded(self._why or "the session has ended; open another")

    def trajectories(self, result: RewardResult, end: SessionEndRequest) -> Sequence[Trajectory]:
        """Return the trajectories of its branches, with the rewards that were given."""
        return self.history.trajectories(self.sample, result, end.turn_rewards)

    async def _sample(self, request: LLMRequest) -> LLMResponse:
        sampling = asyncio.ensure_future(self.chat.generate(request))
        try:
            await asyncio.wait((sampling, self._over), return_when=asyncio.FIRST_COMPLETED)
            if not sampling.done():
                raise SessionEnded("the session ended while this was being answered")
            return await sampling
        except HARMLESS:
            raise
        except ServiceError as error:
            self._break(error)
            raise
        finally:
            sampling.cancel()

    def _break(self, error: ServiceError) -> None:
        if not self._over.done():
            self._why = error.message
            self._over.set_exception(error)
            self._over.exception()  # looked at: nobody may be waiting for it

    def _request(self, prompt_ids: tuple[int, ...], ask: TurnRequest, number: int) -> LLMRequest:
        gconfig = ask.gconfig
        seed = self.chat.gconfig.seed
        if (
            gconfig.seed is None and seed is not None
        ):  # neither turns nor siblings repeat each other
            place = self.sample.index * self._config.max_turns + number
            gconfig = gconfig.model_copy(update={"seed": (seed + place) % SEEDS})
        return LLMRequest(
            rid=f"{self.id}.{number}.{uuid.uuid4().hex[:8]}",
            input_ids=prompt_ids,
            gconfig=gconfig,
            top_logprobs=ask.top_logprobs,
            metadata={"group_id": self.sample.prompt.group_id, "session_id": self.id},
        )

    def _read(self, ask: TurnRequest, response: LLMResponse) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text and the calls that the client receives."""
        gconfig = ask.gconfig
        stream = TextStream(self.chat.tokenizer, gconfig.stop, gconfig.stop_token_ids)
        text = text_of(response, stream)
        if not ask.tools:
            return text, ()
        reader = ToolCallStream()
        pieces = reader.feed(text) + reader.finish()
        calls = tuple(piece for piece in pieces if isinstance(piece, ToolCall))
        return "".join(piece for piece in pieces if isinstance(piece, str)), calls[: ask.max_calls]
