"""SGLang's native contract over our backend, so that what was written for SGLang runs unchanged.

Shapes are SGLang's (0.5.23). Where it would break a promise of ours we keep the promise and say so
beside the route. Updates of weights and adapters answer failures with `success: false`, everything
else with `{"error": {"message"}}`; both are 400 for what a client can mend.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import ErrorBody, ServiceError
from headway.contracts.http import paths
from headway.contracts.types import LLMRequest
from headway.dialects.error_shapes import (
    FAILURES,
    ApiFailure,
    InvalidField,
    ShapedError,
    route_in,
)
from headway.runtime.disconnect import unless_disconnected
from headway.runtime.event_stream import EventStream
from headway.runtime.logging import note_request
from headway.runtime.offload import offload, size_of
from headway.text.tokenizer import TextTokenizer
from inference_server.adapters import Adapters
from inference_server.dialects.headway.generation import local
from inference_server.dialects.sglang.dialect import SGLangDialect
from inference_server.dialects.sglang.types import (
    AbortBody,
    CheckerBody,
    DetokenizeBody,
    DiskUpdateBody,
    EmptyBody,
    GenerateBody,
    GroupUpdateBody,
    JoinGroupBody,
    LeaveGroupBody,
    LoadAdapterBody,
    ParameterBody,
    PauseBody,
    PostProcessBody,
    RelabelBody,
    SelectingBody,
    TokenizeBody,
    UnloadAdapterBody,
    UpdateBody,
)
from inference_server.dialects.sglang.weight_updates import KeptAside, Published, UpdateOptions
from weight_sync.transports.process_group import GroupAddress, TensorSpec

HEALTH_TIMEOUT_S = 20.0
MAX_FLUSH_S = 3600.0


def error_shape(failure: ApiFailure) -> dict[str, Any]:
    """SGLang's error body."""
    return {"error": {"message": failure.message}}


class UpdateFailure(BaseModel):
    """Response to an update that failed."""

    success: Literal[False]
    message: str
    num_paused_requests: int | None = None


class AdapterFailure(BaseModel):
    """Response to a change of adapters that failed."""

    success: Literal[False]
    error_message: str
    loaded_adapters: dict[str, str]


FLUSH_FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"content": {"text/plain": {}, "application/json": {}}}
}
UPDATE_FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": UpdateFailure | ShapedError | ErrorBody}
}
ADAPTER_FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AdapterFailure | ShapedError | ErrorBody}
}
router = APIRouter(route_class=route_in(error_shape), responses=FAILURES)


@router.put(paths.SGLANG_GENERATE, include_in_schema=False)
@router.post(paths.SGLANG_GENERATE, response_model=None)
async def generate(body: GenerateBody, request: Request) -> Response:
    """Generate; with `stream`, server-sent events that each hold all there is so far, then `[DONE]`."""
    if not body.stream:
        return JSONResponse(await unless_disconnected(request, _dialect(request).generate(body)))
    chunks = _dialect(request).stream(body)
    first = await unless_disconnected(request, anext(chunks))
    return EventStream(_events(first, chunks))


async def _events(
    first: dict[str, Any], rest: AsyncGenerator[dict[str, Any]]
) -> AsyncGenerator[str]:
    async with aclosing(rest):
        try:
            yield _event(first)
            async for chunk in rest:
                yield _event(chunk)
        except ServiceError as error:
            note_request(code=error.code, reason=error.message)
            yield _event({"error": {"message": error.message}})
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


@router.post(paths.SGLANG_LORA_LOAD, response_model=None, responses=ADAPTER_FAILURES)
async def load_adapter(body: LoadAdapterBody, request: Request) -> Response:
    adapters = local(request).adapters
    return await _changed(adapters, adapters.load(body.lora_name, body.lora_path))


@router.post(paths.SGLANG_LORA_UNLOAD, response_model=None, responses=ADAPTER_FAILURES)
async def unload_adapter(body: UnloadAdapterBody, request: Request) -> Response:
    adapters = local(request).adapters
    return await _changed(adapters, adapters.unload(body.lora_name))


async def _changed(adapters: Adapters, work: Awaitable[object]) -> Response:
    """The answer to a change; paths are not told, since only names address an adapter."""
    failure = ""
    try:
        await work
    except ServiceError as error:
        note_request(code=error.code, reason=error.message)
        failure = error.message
    names = {name: name for name in adapters.versions}
    answer = {"success": not failure, "error_message": failure, "loaded_adapters": names}
    return JSONResponse(answer, status_code=400 if failure else 200)


@router.post(paths.SGLANG_ABORT, response_class=Response)
async def abort(body: AbortBody, request: Request) -> Response:
    if body.abort_all or body.rid:
        await _dialect(request).abort(None if body.abort_all else body.rid)
    return Response()


@router.get(paths.SGLANG_PING, response_class=Response)
async def ping() -> Response:
    return Response()


@router.get(paths.SGLANG_READY, response_class=Response)
async def ready(request: Request) -> Response:
    generator = local(request)
    is_out = generator.backend.is_paused or generator.admission.draining.is_set()
    return Response(status_code=503 if is_out else 200)


@router.get(paths.SGLANG_HEALTH, response_class=Response)
async def health_generate(request: Request) -> Response:
    """Generates a token; a paused server answers at once that it would not."""
    generator = local(request)
    if generator.backend.is_paused:
        return Response(status_code=503)
    probe = LLMRequest(
        rid=f"HEALTH_CHECK_{uuid.uuid4().hex}",
        input_ids=(0,),
        gconfig=SamplingConfig(max_new_tokens=1, temperature=0.0),
    )
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await generator.agenerate(probe)
    except (TimeoutError, ServiceError):
        return Response(status_code=503)
    return Response()


@router.get(paths.SGLANG_MODEL_OLD)
@router.get(paths.SGLANG_MODEL)
async def model_info(request: Request) -> dict[str, Any]:
    return _dialect(request).model_info()


@router.get(paths.SGLANG_SERVER_OLD)
@router.get(paths.SGLANG_SERVER)
async def server_info(request: Request) -> dict[str, Any]:
    host, port = request.scope["server"]
    return _dialect(request).server_info(host, port)


@router.get(paths.SGLANG_VERSION_OLD)
async def weight_version(request: Request) -> dict[str, str]:
    return {"weight_version": _dialect(request).updates.label}


@router.get(paths.SGLANG_LOAD_OLD)
async def load(request: Request) -> list[dict[str, Any]]:
    return _dialect(request).old_load()


@router.get(paths.SGLANG_LOADS)
async def loads(request: Request) -> dict[str, Any]:
    return {"loads": [_dialect(request).load()]}


@router.post(paths.SGLANG_PAUSE)
async def pause(body: PauseBody, request: Request) -> dict[str, str]:
    await local(request).backend.pause(body.mode)
    return {"message": "Generation paused successfully.", "status": "ok"}


@router.post(paths.SGLANG_CONTINUE, response_model=None, responses=UPDATE_FAILURES)
async def resume(_: EmptyBody, request: Request) -> Response:
    """Serve what was received and continue; if it cannot be served, stay paused and say why."""
    try:
        await _dialect(request).updates.complete()
    except ServiceError as error:
        return _failed(error)
    await local(request).backend.resume()
    return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})


@router.get(paths.SGLANG_FLUSH, include_in_schema=False)
@router.post(paths.SGLANG_FLUSH, response_class=PlainTextResponse, responses=FLUSH_FAILURES)
async def flush(
    request: Request,
    timeout: Annotated[float, Query(ge=0.0, le=MAX_FLUSH_S, allow_inf_nan=False)] = 0.0,
) -> PlainTextResponse:
    if await _dialect(request).flush(timeout):
        return PlainTextResponse("Cache flushed.\n")
    return PlainTextResponse("Flush cache failed.\n", status_code=400)


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
        "max_model_len": local(request).backend.limits.max_context,
    }


@router.post(paths.SGLANG_DETOKENIZE)
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, Any]:
    skips = body.skip_special_tokens
    tokenizer = _tokenizer(request)
    return {"text": await offload(size_of(body.tokens), _text_of, tokenizer, body.tokens, skips)}


@router.post(paths.SGLANG_UPDATE_DISK, response_model=None, responses=UPDATE_FAILURES)
async def update_from_disk(body: DiskUpdateBody, request: Request) -> Response:
    """A directory of ours or a plain one, below one of `weights.allow`.

    Running sequences do as `update_policy` says, or end with `abort_all_requests`; SGLang waits for
    them. A cache that cannot be flushed is reported, and is no failure: the weights did change.
    """
    paused = local(request).backend.is_paused
    try:
        published = await _dialect(request).update_from_disk(body.model_path, _options(body))
    except ServiceError as error:
        return _failed(error, num_paused_requests=0)
    text = f"Succeeded to update model weights.{_described(published)}"
    running = published.running if paused else 0
    return JSONResponse({"success": True, "message": text, "num_paused_requests": running})


@router.post(paths.SGLANG_UPDATE_BEGIN, response_model=None, responses=UPDATE_FAILURES)
async def begin_update(_: SelectingBody, request: Request) -> Response:
    return await _done(_dialect(request).updates.begin(), "Success")


@router.post(paths.SGLANG_UPDATE_END, response_model=None, responses=UPDATE_FAILURES)
async def end_update(_: EmptyBody, request: Request) -> Response:
    """Publish everything that the session received, all at once; in SGLang, bucket by bucket."""
    return await _done(_dialect(request).updates.end(), "Success")


@router.post(paths.SGLANG_POST_PROCESS)
async def post_process(_: PostProcessBody) -> dict[str, Any]:
    """Nothing: weights that were published serve as they are."""
    return {"success": True, "message": "Success"}


@router.post(paths.SGLANG_MEMORY_RELEASE)
@router.post(paths.SGLANG_MEMORY_RESUME)
async def refuse_memory_saver() -> None:
    """Refused: SGLang does it only with its memory saver, which `/server_info` calls off."""
    raise InvalidField(
        "this server keeps its memory; leave the call out (enable_memory_saver is false), and give "
        "the trainer a GPU of its own"
    )


@router.post(paths.SGLANG_GROUP_INIT, response_model=None, responses=UPDATE_FAILURES)
async def join_group(body: JoinGroupBody, request: Request) -> Response:
    address = GroupAddress(
        body.group_name,
        body.master_address,
        body.master_port,
        body.rank_offset,
        body.world_size,
        body.backend,
    )
    joined = _dialect(request).updates.join(address)
    return await _done(joined, "Succeeded to initialize custom process group.")


@router.post(paths.SGLANG_GROUP_DESTROY, response_model=None, responses=UPDATE_FAILURES)
async def leave_group(body: LeaveGroupBody, request: Request) -> Response:
    try:
        dropped = await _dialect(request).updates.leave(body.group_name)
    except ServiceError as error:
        return _failed(error)
    text = "Succeeded to destroy custom process group."
    if dropped:
        text += f" {dropped} parameters that were received and not yet served were dropped."
    return JSONResponse({"success": True, "message": text})


@router.post(paths.SGLANG_UPDATE_GROUP, response_model=None, responses=UPDATE_FAILURES)
async def update_from_group(body: GroupUpdateBody, request: Request) -> Response:
    """One bucket, inside of a session or without one.

    It becomes visible with the whole update: at the end of the session; without one, when the model is
    complete, when a paused server continues, or when it carries `weight_version` and the server is not
    paused. Until then the response says that it is kept back.
    """
    specs = [
        TensorSpec(name, dtype, shape)
        for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True)
    ]
    is_flat = body.load_format is not None
    received = _dialect(request).updates.receive(body.group_name, specs, is_flat, _options(body))
    return await _done(received, "Succeeded to update parameter online.")


@router.post(paths.SGLANG_RELABEL, response_model=None)
async def relabel(body: RelabelBody, request: Request) -> dict[str, Any]:
    """Name the update that is under way.

    If there is none, the weights stay and their name changes, also in the spans of tokens that they
    sampled before.
    """
    if body.abort_all_requests:
        await local(request).backend.abort(None)
    await _dialect(request).updates.relabel(body.new_version)
    text = f"Weight version updated to {body.new_version}"
    return {"success": True, "message": text, "new_version": body.new_version}


@router.get(paths.SGLANG_WEIGHTS, include_in_schema=False)
@router.post(paths.SGLANG_WEIGHTS, response_model=None)
async def read_parameter(body: ParameterBody, request: Request) -> Response:
    tensor = await _dialect(request).updates.read(body.name)
    rows = tensor[: body.truncate_size] if tensor.ndim else tensor
    return JSONResponse(rows.float().tolist())


@router.post(paths.SGLANG_CHECKER)
async def check_weights(_: CheckerBody, request: Request) -> dict[str, Any]:
    each, whole = await _dialect(request).updates.checksums()
    ranks = [{"checksums": each, "per_gpu_checksum": whole}]
    return {"success": True, "ranks": ranks, "per_engine_checksum": whole}


async def _done(work: Awaitable[Published | KeptAside | None], text: str) -> Response:
    """The answer to a step of an update."""
    try:
        published = await work
    except ServiceError as error:
        return _failed(error)
    return JSONResponse(
        {"success": True, "message": text + ("" if text == "Success" else _described(published))}
    )


def _failed(error: ServiceError, **more: Any) -> Response:
    note_request(code=error.code, reason=error.message)
    return JSONResponse({"success": False, "message": error.message, **more}, status_code=400)


def _described(published: Published | KeptAside | None) -> str:
    if published is None:
        return ""
    if isinstance(published, KeptAside):
        kept = f" It is kept back, and served at {published.until} at the latest"
        if not published.missing:
            return f"{kept}."
        return f"{kept}; {len(published.missing)} parameters are missing, such as {published.missing[0]}."
    held = "" if published.was_flushed else " The cache was not flushed: requests are running."
    return f" Weight version updated to {published.label}.{held}"


def _options(body: UpdateBody) -> UpdateOptions:
    return UpdateOptions(body.weight_version, body.abort_all_requests, body.flush_cache)


def _text_of(
    tokenizer: TextTokenizer, tokens: tuple[int, ...] | tuple[tuple[int, ...], ...], skips: bool
) -> str | list[str]:
    rows = [list(row) for row in tokens if isinstance(row, tuple)]
    if rows:
        return [tokenizer.decode(row, skips) for row in rows]
    return tokenizer.decode([token for token in tokens if isinstance(token, int)], skips)


def _tokenizer(request: Request) -> TextTokenizer:
    tokenizer = local(request).tokenizer
    if tokenizer is None:
        raise InvalidField(
            "the model directory has no tokenizer.json; this server cannot handle text"
        )
    return tokenizer


def _dialect(request: Request) -> SGLangDialect:
    dialect: SGLangDialect = request.app.state.sglang
    return dialect
