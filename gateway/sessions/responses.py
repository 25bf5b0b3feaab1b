"""A session in the words of OpenAI's responses.

A session remembers the conversation behind each answer, unless `store` is false, so that
`previous_response_id` goes on from it: on its very tokens, since its messages are those of a known turn.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.sessions.access import Entered, enter
from gateway.sessions.answers import answer_stream, answer_whole, event, metadata_of
from gateway.sessions.chat import Message, TurnReply, TurnRequest
from gateway.sessions.chat_completions import MODEL
from gateway.sessions.session import Session
from headway.contracts.http.paths import SESSION_OPENAI
from headway.dialects.error_shapes import FAILURES, ApiFailure, InvalidField, route_in
from headway.dialects.openai.errors import openai_error
from headway.dialects.openai.responses_request import SAMPLING_NAMES, ResponsesRequest
from headway.text.tool_calls import ToolCall

response_routes = APIRouter(route_class=route_in(openai_error, enter), responses=FAILURES)


@response_routes.post(SESSION_OPENAI + "/responses", response_class=Response)
async def responses(body: ResponsesRequest, session: Entered, request: Request) -> Response:
    answer = ResponseAnswer(body)
    work = _run_turn(body, session, answer.id)
    if body.stream:
        return await answer_stream(request, work, answer.events, _failed_event)
    return await answer_whole(request, work, answer.whole)


async def _run_turn(body: ResponsesRequest, session: Session, response_id: str) -> TurnReply:
    said = [*_earlier(body, session), *body.new_messages()]
    ask = TurnRequest(
        messages=[*body.instruction(), *said],
        gconfig=session.chat.sampling(body.given(), SAMPLING_NAMES),
        tools=body.offered_tools(),
        max_calls=1 if body.parallel_tool_calls is False else None,
    )
    reply = await session.run_turn(ask)
    if body.store is not False:
        session.answers[response_id] = [*said, reply.message]
    return reply


def _earlier(body: ResponsesRequest, session: Session) -> list[Message]:
    session.check_open()
    if body.previous_response_id is None:
        return []
    known = session.answers.get(body.previous_response_id)
    if known is None:
        raise InvalidField(
            f"response {body.previous_response_id[:64]!r} is not an answer of this session, or was sent "
            "with store=false; send the whole conversation as input",
            "previous_response_id",
        )
    return known


def _failed_event(failure: ApiFailure) -> str:
    details = {"code": failure.code, "message": failure.message, "param": failure.param}
    return event({"type": "error", "sequence_number": 0, **details}, "error")


class ResponseAnswer:
    """Writes a reply as a response."""

    def __init__(self, body: ResponsesRequest) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._body = body
        self._created = int(time.time())

    def whole(self, reply: TurnReply) -> dict[str, Any]:
        """The response in one piece."""
        is_cut = reply.response.stop_reason == "length"
        return {
            **self._envelope("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "metadata": {**(self._body.metadata or {}), **metadata_of(reply)},
            "output": _output(reply),
            "usage": _usage(reply),
        }

    def events(self, reply: TurnReply) -> Iterator[str]:
        """The response as its events."""
        whole = self.whole(reply)
        started = self._envelope("in_progress")
        bodies: list[dict[str, Any]] = [
            {"type": "response.created", "response": started},
            {"type": "response.in_progress", "response": started},
        ]
        for place, item in enumerate(whole["output"]):
            steps = _message_steps(item) if item["type"] == "message" else _call_steps(item)
            bodies += [{**step, "output_index": place} for step in steps]
        bodies.append({"type": f"response.{whole['status']}", "response": whole})
        for number, body in enumerate(bodies):
            yield event({**body, "sequence_number": number}, str(body["type"]))

    def _envelope(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model or MODEL,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() | {"strict": False} for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _output(reply: TurnReply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    status = "incomplete" if reply.response.stop_reason == "length" else "completed"
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        items.append({**message, "status": status, "content": [part]})
    return items + [_call_item(call) for call in reply.calls]


def _call_item(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def _message_steps(item: dict[str, Any]) -> list[dict[str, Any]]:
    (part,) = item["content"]
    at = {"item_id": item["id"], "content_index": 0}
    started = {**item, "status": "in_progress", "content": []}
    text = {"text": part["text"], "logprobs": []}
    return [
        {"type": "response.output_item.added", "item": started},
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []},
        {"type": "response.output_text.done", **at, **text},
        {"type": "response.content_part.done", **at, "part": part},
        {"type": "response.output_item.done", "item": item},
    ]


def _call_steps(item: dict[str, Any]) -> list[dict[str, Any]]:
    at, arguments = {"item_id": item["id"]}, item["arguments"]
    started = {**item, "status": "in_progress", "arguments": ""}
    kind = "response.function_call_arguments"
    return [
        {"type": "response.output_item.added", "item": started},
        {"type": f"{kind}.delta", **at, "delta": arguments},
        {"type": f"{kind}.done", **at, "arguments": arguments, "name": item["name"]},
        {"type": "response.output_item.done", "item": item},
    ]


def _usage(reply: TurnReply) -> dict[str, Any]:
    prompt, completion = len(reply.prompt_ids), len(reply.response.output_tokens)
    cached = {"cached_tokens": reply.response.cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": prompt,
        "input_tokens_details": cached,
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
