"""SGLang's native contract over a `ServedModel`, so that what was written for SGLang runs unchanged.

Shapes are SGLang's (0.5.23). Where it would break a promise of ours we keep the promise and say so
beside the route. Updates of weights and adapters answer failures with `success: false`, everything
else with `{"error": {"message"}}`; both are 400 for what a client can mend.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import ServiceError
from headway.contracts.http import paths
from headway.contracts.types import LLMRequest
from headway.dialects.error_shapes import FAILURES, InvalidField, route_in
from headway.dialects.event_stream import event_stream
from headway.dialects.request_ids import request_ids
from headway.dialects.served_model import routing_key, served_model
from headway.dialects.sglang.dialect import SGLangDialect
from headway.dialects.sglang.errors import sglang_error
from headway.dialects.sglang.types import (
    AbortBody,
    DetokenizeBody,
    GenerateBody,
    PauseBody,
    PostProcessBody,
    PullBody,
    TokenizeBody,
)
from headway.runtime.disconnect import unless_disconnected
from headway.runtime.offload import offload, size_of
from headway.text.tokenizer import TextTokenizer

HEALTH_TIMEOUT_S = 20.0
MAX_FLUSH_S = 3600.0
FLUSH_FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"content": {"text/plain": {}, "application/json": {}}}
}
router = APIRouter(route_class=route_in(sglang_error), responses=FAILURES)


def dialect_of(request: Request) -> SGLangDialect:
    """SGLang's API of an app (`app.state.sglang`)."""
    dialect: SGLangDialect = request.app.state.sglang
    return dialect


@router.put(paths.SGLANG_GENERATE, include_in_schema=False)
@router.post(paths.SGLANG_GENERATE, response_model=None)
async def generate(body: GenerateBody, request: Request) -> Response:
    """Generate; with `stream`, server-sent events that each hold all there is so far, then `[DONE]`."""
    dialect, session = dialect_of(request), routing_key(request)
    if not body.stream:
        return JSONResponse(await unless_disconnected(request, dialect.generate(body, session)))
    return await event_stream(request, dialect.stream(body, session), sglang_error)


@router.post(paths.SGLANG_ABORT, response_class=Response)
async def abort(body: AbortBody, request: Request) -> Response:
    if body.abort_all or body.rid:
        await request_ids(request).abort(None if body.abort_all else body.rid)
    return Response()


@router.get(paths.SGLANG_PING, response_class=Response)
async def ping() -> Response:
    return Response()


@router.get(paths.SGLANG_READY, response_class=Response)
async def ready(request: Request) -> Response:
    return Response(status_code=200 if served_model(request).is_ready else 503)


@router.get(paths.SGLANG_HEALTH, response_class=Response)
async def health_generate(request: Request) -> Response:
    """Generates a token; a paused server answers at once that it would not."""
    model = served_model(request)
    if model.is_paused:
        return Response(status_code=503)
    probe = LLMRequest(
        rid=f"HEALTH_CHECK_{uuid.uuid4().hex}",
        input_ids=(0,),
        gconfig=SamplingConfig(max_new_tokens=1, temperature=0.0),
    )
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await model.agenerate(probe)
    except (TimeoutError, ServiceError):
        return Response(status_code=503)
    return Response()


@router.get(paths.SGLANG_MODEL_OLD)
@router.get(paths.SGLANG_MODEL)
async def model_info(request: Request) -> dict[str, Any]:
    return dialect_of(request).model_info()


@router.get(paths.SGLANG_SERVER_OLD)
@router.get(paths.SGLANG_SERVER)
async def server_info(request: Request, config_format: str | None = None) -> dict[str, Any]:
    host, port = request.scope["server"]
    dialect = dialect_of(request)
    info = dialect.server_info(host, port)
    return info | ({"vllm_config": dialect.vllm_config()} if config_format else {})


@router.get(paths.SGLANG_VERSION_OLD)
async def weight_version(request: Request) -> dict[str, str]:
    return {"weight_version": dialect_of(request).label}


@router.get(paths.SGLANG_LOAD_OLD)
async def load(request: Request) -> list[dict[str, Any]]:
    return dialect_of(request).old_load()


@router.get(paths.SGLANG_LOADS)
async def loads(request: Request) -> dict[str, Any]:
    return {"loads": [dialect_of(request).load()]}


@router.post(paths.SGLANG_PAUSE)
async def pause(body: PauseBody, request: Request) -> dict[str, str]:
    await served_model(request).pause(body.mode)
    return {"message": "Generation paused successfully.", "status": "ok"}


@router.get(paths.SGLANG_FLUSH, include_in_schema=False)
@router.post(paths.SGLANG_FLUSH, response_class=PlainTextResponse, responses=FLUSH_FAILURES)
async def flush(
    request: Request,
    timeout: Annotated[float, Query(ge=0.0, le=MAX_FLUSH_S, allow_inf_nan=False)] = 0.0,
) -> PlainTextResponse:
    if await dialect_of(request).flush(timeout):
        return PlainTextResponse("Cache flushed.\n")
    return PlainTextResponse("Flush cache failed.\n", status_code=400)


@router.post(paths.SGLANG_PULL)
async def pull(body: PullBody, request: Request) -> dict[str, Any]:
    """Bring a directory up to a version of a store, for `update_weights_from_disk` to load.

    Only its index is looked for, where its disk is seen: a version that is torn fails there, before
    anything is swapped.
    """
    place = await asyncio.to_thread(dialect_of(request).pulled.pull, body)
    return {"success": True, "message": f"{body.local_checkpoint_dir} stands for {place}"}


@router.post(paths.SGLANG_TOKENIZE)
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    texts = (body.prompt,) if isinstance(body.prompt, str) else body.prompt
    tokenizer = _tokenizer(request)
    tokenizer.check_length(*texts)
    ids = await offload(
        size_of(texts), lambda: [tokenizer.encode(text, body.add_special_tokens) for text in texts]
    )
    is_one = isinstance(body.prompt, str)
    return {
        "tokens": ids[0] if is_one else ids,
        "count": len(ids[0]) if is_one else [len(row) for row in ids],
        "max_model_len": served_model(request).max_context,
    }


@router.post(paths.SGLANG_DETOKENIZE)
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, Any]:
    skips = body.skip_special_tokens
    tokenizer = _tokenizer(request)
    return {"text": await offload(size_of(body.tokens), _text_of, tokenizer, body.tokens, skips)}


def _text_of(
    tokenizer: TextTokenizer, tokens: tuple[int, ...] | tuple[tuple[int, ...], ...], skips: bool
) -> str | list[str]:
    rows = [list(row) for row in tokens if isinstance(row, tuple)]
    if rows:
        return [tokenizer.decode(row, skips) for row in rows]
    return tokenizer.decode([token for token in tokens if isinstance(token, int)], skips)


def _tokenizer(request: Request) -> TextTokenizer:
    tokenizer = served_model(request).tokenizer
    if tokenizer is None:
        raise InvalidField(
            "the model directory has no tokenizer.json; this server cannot handle text"
        )
    return tokenizer


@router.post(paths.SGLANG_POST_PROCESS)
async def post_process(_: PostProcessBody) -> dict[str, Any]:
    """Nothing: weights that were published serve as they are."""
    return {"success": True, "message": "Success"}
