"""A session in the words of Anthropic's messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.sessions.access import Entered, enter
from gateway.sessions.answers import answer_stream, answer_whole, event
from gateway.sessions.chat import Chat, TurnReply, TurnRequest
from headway.contracts.http.paths import SESSION_ANTHROPIC
from headway.dialects.anthropic.errors import anthropic_error
from headway.dialects.anthropic.request import SAMPLING_NAMES, MessagesRequest
from headway.dialects.error_shapes import FAILURES, ApiFailure, route_in

message_routes = APIRouter(route_class=route_in(anthropic_error, enter), responses=FAILURES)


@message_routes.post(SESSION_ANTHROPIC + "/v1/messages", response_class=Response)
async def messages(body: MessagesRequest, session: Entered, request: Request) -> Response:
    answer = MessageAnswer(body)
    work = session.run_turn(_ask_of(body, session.chat))
    if body.stream:
        return await answer_stream(request, work, answer.events, _failed_event)
    return await answer_whole(request, work, answer.whole)


def _failed_event(failure: ApiFailure) -> str:
    return event(anthropic_error(failure), "error")


def _ask_of(body: MessagesRequest, chat: Chat) -> TurnRequest:
    is_single = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    return TurnRequest(
        messages=body.rendered(),
        gconfig=chat.sampling(body.given(), SAMPLING_NAMES),
        tools=body.offered_tools(),
        max_calls=1 if is_single else None,
    )


class MessageAnswer:
    """Writes a reply as a message."""

    def __init__(self, body: MessagesRequest) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = body.model

    def whole(self, reply: TurnReply) -> dict[str, Any]:
        """The message in one piece."""
        return {
            **self._head(reply),
            "content": _content(reply),
            **_stop(reply),
            "usage": _usage(reply, len(reply.response.output_tokens)),
        }

    def events(self, reply: TurnReply) -> Iterator[str]:
        """The message as its events."""
        head = {**self._head(reply), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _named({"type": "message_start", "message": {**head, "usage": _usage(reply, 0)}})
        for place, block in enumerate(_content(reply)):
            for step in _steps(block):
                yield _named({**step, "index": place})
        usage = {"output_tokens": len(reply.response.output_tokens)}
        yield _named({"type": "message_delta", "delta": _stop(reply), "usage": usage})
        yield _named({"type": "message_stop"})

    def _head(self, reply: TurnReply) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}


def _named(body: dict[str, Any]) -> str:
    return event(body, body["type"])


def _content(reply: TurnReply) -> list[dict[str, Any]]:
    """Text, if there is any or nothing else, and then the calls."""
    texts = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    calls = reply.message.get("tool_calls", ())
    return texts + [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": call["function"]["arguments"],
        }
        for call in calls
    ]


def _steps(block: dict[str, Any]) -> list[dict[str, Any]]:
    if block["type"] == "text":
        start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
    else:
        written = json.dumps(block["input"], ensure_ascii=False)
        start, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": written}
    return [
        {"type": "content_block_start", "content_block": start},
        {"type": "content_block_delta", "delta": delta},
        {"type": "content_block_stop"},
    ]


def _stop(reply: TurnReply) -> dict[str, Any]:
    """Why the answer ended; a model that calls tools waits for them, however it ended."""
    response = reply.response
    if response.stop_reason != "stop":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reply.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(response.stop_match, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": response.stop_match}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(reply: TurnReply, output_tokens: int) -> dict[str, Any]:
    """Return the usage; cached tokens are counted apart, as Anthropic does."""
    cached = reply.response.cached_tokens
    return {
        "input_tokens": len(reply.prompt_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output_tokens,
    }
