"""What SGLang's contract has for one server beside generation: weights, adapters, memory.

See `headway.dialects.sglang.routes`.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from headway.contracts.errors import ServiceError
from headway.contracts.http import paths
from headway.dialects.error_shapes import FAILURES, InvalidField, route_in
from headway.dialects.sglang.errors import UPDATE_FAILURES, failed_update, sglang_error
from headway.dialects.sglang.relay import KeptBack, dropped_text
from headway.dialects.sglang.routes import dialect_of
from headway.dialects.sglang.types import (
    DiskUpdateBody,
    EmptyBody,
    GroupUpdateBody,
    JoinGroupBody,
    LeaveGroupBody,
    RelabelBody,
    SelectingBody,
)
from inference_server.dialects.headway.generation import local
from inference_server.dialects.sglang.group_updates import (
    UpdateOptions,
    address_of,
    options_of,
    specs_of,
)
from inference_server.dialects.sglang.types import (
    CheckerBody,
    ParameterBody,
)
from inference_server.dialects.sglang.weight_updates import Published, SGLangWeightUpdates

router = APIRouter(route_class=route_in(sglang_error), responses=FAILURES)


@router.post(paths.SGLANG_CONTINUE, response_model=None, responses=UPDATE_FAILURES)
async def resume(_: EmptyBody, request: Request) -> Response:
    """Serve what was received and continue; if it cannot be served, stay paused and say why."""
    try:
        await _updates(request).groups.complete()
    except ServiceError as error:
        return failed_update(error)
    await local(request).resume()
    return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})


@router.post(paths.SGLANG_UPDATE_DISK, response_model=None, responses=UPDATE_FAILURES)
async def update_from_disk(body: DiskUpdateBody, request: Request) -> Response:
    """A directory of ours or a plain one, below one of `weights.allow`.

    Running sequences do as `update_policy` says, or end with `abort_all_requests`; SGLang waits for
    them. A cache that cannot be flushed is reported, and is no failure: the weights did change.
    """
    paused = local(request).is_paused
    try:
        published = await published_from_disk(request, body.model_path, options_of(body))
    except ServiceError as error:
        return failed_update(error, num_paused_requests=0)
    text = f"Succeeded to update model weights.{_described(published)}"
    running = published.running if paused else 0
    return JSONResponse({"success": True, "message": text, "num_paused_requests": running})


async def published_from_disk(request: Request, path: str, options: UpdateOptions) -> Published:
    """Publish a directory; the model may be called by it from then on.

    Raises:
        ServiceError: by `SGLangWeightUpdates.from_disk`.
    """
    dialect = dialect_of(request)
    published = await _updates(request).from_disk(dialect.pulled.place_of(path), options)
    generator = local(request)
    dialect.model_path = path
    generator.model_paths = (*generator.model_paths[:1], path)
    return published


@router.post(paths.SGLANG_UPDATE_BEGIN, response_model=None, responses=UPDATE_FAILURES)
async def begin_update(_: SelectingBody, request: Request) -> Response:
    return await _done(_updates(request).groups.begin(), "Success")


@router.post(paths.SGLANG_UPDATE_END, response_model=None, responses=UPDATE_FAILURES)
async def end_update(_: EmptyBody, request: Request) -> Response:
    """Publish everything that the session received, all at once; in SGLang, bucket by bucket."""
    return await _done(_updates(request).groups.end(), "Success")


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
    joined = _updates(request).groups.join(address_of(body))
    return await _done(joined, "Succeeded to initialize custom process group.")


@router.post(paths.SGLANG_GROUP_DESTROY, response_model=None, responses=UPDATE_FAILURES)
async def leave_group(body: LeaveGroupBody, request: Request) -> Response:
    try:
        dropped = await _updates(request).groups.leave(body.group_name)
    except ServiceError as error:
        return failed_update(error)
    text = f"Succeeded to destroy custom process group. {dropped_text(dropped)}".rstrip()
    return JSONResponse({"success": True, "message": text})


@router.post(paths.SGLANG_UPDATE_GROUP, response_model=None, responses=UPDATE_FAILURES)
async def update_from_group(body: GroupUpdateBody, request: Request) -> Response:
    """One bucket, inside of a session or without one.

    It becomes visible with the whole update: at the end of the session; without one, when the model is
    complete, when a paused server continues, or when it carries `weight_version` and the server is not
    paused. Until then the response says that it is kept back.
    """
    received = _updates(request).groups.receive(
        body.group_name, specs_of(body), body.is_flat, options_of(body)
    )
    return await _done(received, "Succeeded to update parameter online.")


@router.post(paths.SGLANG_RELABEL, response_model=None)
async def relabel(body: RelabelBody, request: Request) -> dict[str, Any]:
    """Name the update that is under way.

    If there is none, the weights stay and their name changes, also in the spans of tokens that they
    sampled before.
    """
    if body.abort_all_requests:
        await local(request).abort(None)
    await _updates(request).groups.relabel(body.new_version)
    text = f"Weight version updated to {body.new_version}"
    return {"success": True, "message": text, "new_version": body.new_version}


@router.get(paths.SGLANG_WEIGHTS, include_in_schema=False)
@router.post(paths.SGLANG_WEIGHTS, response_model=None)
async def read_parameter(body: ParameterBody, request: Request) -> Response:
    tensor = await _updates(request).read(body.name)
    rows = tensor[: body.truncate_size] if tensor.ndim else tensor
    return JSONResponse(rows.float().tolist())


@router.post(paths.SGLANG_CHECKER)
async def check_weights(_: CheckerBody, request: Request) -> dict[str, Any]:
    each, whole = await _updates(request).checksums()
    ranks = [{"checksums": each, "per_gpu_checksum": whole}]
    return {"success": True, "ranks": ranks, "per_engine_checksum": whole}


async def _done(work: Awaitable[Published | KeptBack | None], text: str) -> Response:
    """The answer to a step of an update."""
    try:
        published = await work
    except ServiceError as error:
        return failed_update(error)
    return JSONResponse(
        {"success": True, "message": text + ("" if text == "Success" else _described(published))}
    )


def _described(published: Published | KeptBack | None) -> str:
    if published is None:
        return ""
    if isinstance(published, KeptBack):
        return f" {published.described}"
    held = "" if published.was_flushed else " The cache was not flushed: requests are running."
    return f" Weight version updated to {published.label}.{held}"


def _updates(request: Request) -> SGLangWeightUpdates:
    updates: SGLangWeightUpdates = request.app.state.sglang_updates
    return updates
