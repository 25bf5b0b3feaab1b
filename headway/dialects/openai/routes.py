"""OpenAI's routes, for its unmodified clients.

Answers carry more than the standard: `token_ids`, `prompt_token_ids` and `version_runs`
(`[version, from, to]` over the sampled tokens) in each choice, `prompt_token_ids` of a chat beside its
choices too, the version in `metadata`, and the finish reason `abort` of a request that was aborted.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from headway.contracts.http import paths
from headway.dialects.error_shapes import FAILURES, route_in
from headway.dialects.event_stream import event_stream
from headway.dialects.openai.chat_request import ChatRequest
from headway.dialects.openai.completion_plans import (
    adapter_of,
    plan_chat,
    plan_completion,
)
from headway.dialects.openai.completion_request import CompletionRequest
from headway.dialects.openai.errors import openai_error
from headway.dialects.openai.job import CompletionJob
from headway.dialects.served_model import routing_key, served_model
from headway.runtime.disconnect import unless_disconnected
from headway.runtime.offload import offload, size_of

router = APIRouter(route_class=route_in(openai_error), responses=FAILURES)


@router.get(paths.MODELS)
async def models(request: Request) -> dict[str, Any]:
    names = [None, *served_model(request).adapter_versions]
    return {"object": "list", "data": [_card(request, name) for name in names]}


@router.get(paths.MODEL.replace("}", ":path}"))  # a name may have slashes
async def model(model: str, request: Request) -> dict[str, Any]:
    return _card(request, adapter_of(model, served_model(request)))


@router.post(paths.COMPLETIONS, response_class=Response)
async def complete(body: CompletionRequest, request: Request) -> Response:
    served, session = served_model(request), routing_key(request)
    job = await offload(size_of(body), plan_completion, body, served, session)
    return await _respond(request, job, bool(body.stream))


@router.post(paths.CHAT_COMPLETIONS, response_class=Response)
async def chat(body: ChatRequest, request: Request) -> Response:
    served, session = served_model(request), routing_key(request)
    job = await offload(size_of(body), plan_chat, body, served, session)
    return await _respond(request, job, bool(body.stream))


async def _respond(request: Request, job: CompletionJob, is_streamed: bool) -> Response:
    if not is_streamed:
        return JSONResponse(await unless_disconnected(request, job.answer(served_model(request))))
    return await event_stream(request, job.chunks(served_model(request)), openai_error)


def _card(request: Request, adapter: str | None = None) -> dict[str, Any]:
    served = served_model(request)
    return {
        "id": adapter or served.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "headway",
        "max_model_len": served.max_context,
        **({} if adapter is None else {"parent": served.model_name}),
    }
