"""A session in the words of OpenAI's chat completions.

Beyond the standard, `metadata` holds the turn's number and the version that sampled it, and with
`return_token_ids: true` a choice carries `token_ids`, `prompt_token_ids` and `version_runs`, and the
answer, or the first chunk of a stream, `prompt_token_ids` once more, where vLLM's clients look.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.sessions.access import Entered, enter
from gateway.sessions.answers import answer_stream, answer_whole, event, metadata_of
from gateway.sessions.chat import Chat, TurnReply, TurnRequest
from headway.contracts.http.paths import SESSION_OPENAI
from headway.dialects.error_shapes import FAILURES, ApiFailure, InvalidField, route_in
from headway.dialects.openai.chat_request import ChatRequest
from headway.dialects.openai.errors import openai_error
from headway.dialects.openai.fields import SAMPLING_NAMES
from headway.dialects.openai.logprobs import TokenNames, token_records
from headway.text.tool_calls import ToolCall

MODEL = "policy"
"""Name under which the session's model is listed; requests may call it by any name."""

chat_routes = APIRouter(route_class=route_in(openai_error, enter), responses=FAILURES)


@chat_routes.get(SESSION_OPENAI + "/models")
async def models(session: Entered) -> dict[str, Any]:
    session.check_open()
    card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "headway"}
    return {"object": "list", "data": [card]}


@chat_routes.post(SESSION_OPENAI + "/chat/completions", response_class=Response)
async def chat_completions(body: ChatRequest, session: Entered, request: Request) -> Response:
    answer = ChatAnswer(body, session.chat)
    work = session.run_turn(ask_of(body, session.chat))
    if body.stream:
        return await answer_stream(request, work, answer.events, failed_event)
    return await answer_whole(request, work, answer.whole)


def failed_event(failure: ApiFailure) -> str:
    """Return the event by which a stream reports a failure."""
    return event(openai_error(failure))


def ask_of(body: ChatRequest, chat: Chat) -> TurnRequest:
    """Convert a request of the API to one of the session.

    Raises:
        InvalidField: it asks for more than one choice, or contradicts itself.
    """
    body.check()
    if body.num_choices > 1:
        raise InvalidField("a session samples one answer per request; send n=1, or ask again", "n")
    given = {**body.given(), "max_new_tokens": body.max_new_tokens}
    return TurnRequest(
        messages=[message.rendered() for message in body.messages],
        gconfig=chat.sampling(given, SAMPLING_NAMES),
        tools=[tool.rendered() for tool in body.offered_tools],
        template_args=body.template_args(),
        top_logprobs=body.top_logprobs or 0,
        max_calls=1 if body.parallel_tool_calls is False else None,
    )


class ChatAnswer:
    """Writes a reply as a chat completion."""

    def __init__(self, body: ChatRequest, chat: Chat) -> None:
        self._body = body
        as_ids = body.return_tokens_as_token_ids
        self._names = TokenNames(chat.tokenizer, as_ids) if body.logprobs else None
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
        }

    def whole(self, reply: TurnReply) -> dict[str, Any]:
        """The completion in one piece."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.text if reply.text or not reply.calls else None,
            "refusal": None,
        }
        if reply.calls:
            message["tool_calls"] = [_written(call) for call in reply.calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(reply),
            "finish_reason": _finish_reason(reply),
            **self._extension(reply),
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": _usage(reply),
            "metadata": metadata_of(reply),
            **self._prompt(reply),
        }

    def events(self, reply: TurnReply) -> Iterator[str]:
        """The completion in chunks."""
        yield self._chunk({"role": "assistant", "content": ""}, self._prompt(reply))
        if reply.text or self._names is not None:
            yield self._chunk({"content": reply.text}, logprobs=self._logprobs(reply))
        for place, call in enumerate(reply.calls):
            yield self._chunk({"tool_calls": [{"index": place, **_written(call)}]})
        end = {"finish_reason": _finish_reason(reply), **self._extension(reply)}
        yield self._chunk({}, {"metadata": metadata_of(reply)}, **end)
        if self._body.has_usage_chunk:
            body = {**self._head, "object": "chat.completion.chunk", "choices": []}
            yield event({**body, "usage": _usage(reply)})
        yield "data: [DONE]\n\n"

    def _chunk(
        self, delta: dict[str, Any], beside: dict[str, Any] | None = None, **choice: Any
    ) -> str:
        only = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
        body = {**self._head, "object": "chat.completion.chunk", "choices": [only]}
        return event({**body, **(beside or {})})

    def _prompt(self, reply: TurnReply) -> dict[str, Any]:
        return {"prompt_token_ids": reply.prompt_ids} if self._body.return_token_ids else {}

    def _logprobs(self, reply: TurnReply) -> dict[str, Any] | None:
        if self._names is None:
            return None
        response = reply.response
        records = token_records(
            self._names, response.output_tokens, response.output_logprobs, response.top_logprobs
        )
        return {"content": records, "refusal": None}

    def _extension(self, reply: TurnReply) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {
            "token_ids": reply.response.output_tokens,
            **self._prompt(reply),
            "version_runs": reply.response.version_runs,
        }


def _finish_reason(reply: TurnReply) -> str:
    if reply.response.stop_reason == "stop":
        return "tool_calls" if reply.calls else "stop"
    return "length"


def _usage(reply: TurnReply) -> dict[str, Any]:
    prompt, completion = len(reply.prompt_ids), len(reply.response.output_tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reply.response.cached_tokens},
    }


def _written(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
