"""Updates of a trainer that speaks to the fleet as to one engine, in SGLang's or vLLM's words.

Servers read the directory that it names, so it is on a disk that all of them have; or one of them
receives what it broadcasts, and the others read from that one. A server that joins later reads it, too.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.app.fleet import Fleet
from gateway.app.foreign_weights import ForeignWeights
from gateway.app.relayed_updates import RelayedUpdates
from gateway.service.routes import service_of
from headway.contracts.errors import ServiceError
from headway.contracts.http import paths
from headway.dialects.error_shapes import FAILURES, route_in
from headway.dialects.openai.errors import openai_error
from headway.dialects.served_model import served_model
from headway.dialects.sglang.errors import UPDATE_FAILURES, failed_update, sglang_error
from headway.dialects.sglang.relay import RelayResponse
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
from headway.dialects.vllm.types import CollectiveCallBody, TransferBody, path_to_reload
from headway.runtime.disconnect import unless_disconnected

router = APIRouter(route_class=route_in(sglang_error), responses=FAILURES)
vllm_router = APIRouter(route_class=route_in(openai_error), responses=FAILURES)


@router.post(paths.SGLANG_UPDATE_DISK, response_model=None, responses=UPDATE_FAILURES)
async def update_from_disk(body: DiskUpdateBody, request: Request) -> Response:
    """A directory as Hugging Face's libraries save a model, below one of every server's `weights.allow`.

    Running sequences do as the servers' `update_policy` says, or end with `abort_all_requests`. Shared
    prefixes of the old version are never used again, so `flush_cache` has nothing to do.
    """
    running = served_model(request).load().running if served_model(request).is_paused else 0
    try:
        label = await _publish(
            request, body.model_path, body.weight_version, body.abort_all_requests
        )
    except ServiceError as error:
        return failed_update(error, num_paused_requests=0)
    text = f"Succeeded to update model weights. Weight version updated to {label}."
    return JSONResponse({"success": True, "message": text, "num_paused_requests": running})


@router.post(paths.SGLANG_RELABEL, response_model=None)
async def relabel(body: RelabelBody, request: Request) -> dict[str, Any]:
    """Name the update that is under way.

    If there is none, the version that serves, also in the spans of tokens that it sampled before.
    """
    if body.abort_all_requests:
        await served_model(request).abort(None)
    relayed = _relayed(request)
    if relayed.is_under_way:
        await relayed.take("relabel", body)
    else:
        await _fleet(request).state.rename(body.new_version)
    text = f"Weight version updated to {body.new_version}"
    return {"success": True, "message": text, "new_version": body.new_version}


@router.post(paths.SGLANG_CONTINUE, response_model=None, responses=UPDATE_FAILURES)
async def resume(_: EmptyBody, request: Request) -> Response:
    """Serve what was received and continue; if it cannot be served, stay paused and say why."""
    try:
        await _relayed(request).complete()
    except ServiceError as error:
        return failed_update(error)
    await served_model(request).resume()
    return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})


@router.post(paths.SGLANG_GROUP_INIT, response_model=None, responses=UPDATE_FAILURES)
async def join_group(body: JoinGroupBody, request: Request) -> Response:
    """One server takes part; the others read from it what it receives."""
    joined = _relayed(request).join(body)
    return await _done(joined, "Succeeded to initialize custom process group.")


@router.post(paths.SGLANG_GROUP_DESTROY, response_model=None, responses=UPDATE_FAILURES)
async def leave_group(body: LeaveGroupBody, request: Request) -> Response:
    left = _relayed(request).take("leave", body)
    return await _done(left, "Succeeded to destroy custom process group.")


@router.post(paths.SGLANG_UPDATE_GROUP, response_model=None, responses=UPDATE_FAILURES)
async def update_from_group(body: GroupUpdateBody, request: Request) -> Response:
    """One bucket; the fleet serves it when a single server would, see `/end_weight_update` there."""
    received = _relayed(request).take("receive", body)
    return await _done(received, "Succeeded to update parameter online.")


@router.post(paths.SGLANG_UPDATE_BEGIN, response_model=None, responses=UPDATE_FAILURES)
async def begin_update(_: SelectingBody, request: Request) -> Response:
    return await _done(_relayed(request).take("begin"), "Success")


@router.post(paths.SGLANG_UPDATE_END, response_model=None, responses=UPDATE_FAILURES)
async def end_update(_: EmptyBody, request: Request) -> Response:
    """Publish everything that the session received, all at once."""
    return await _done(_relayed(request).take("end"), "Success")


@vllm_router.post(paths.VLLM_CALL)
async def reload_weights(body: CollectiveCallBody, request: Request) -> dict[str, Any]:
    """Likewise, as vLLM's clients ask for it."""
    await _publish(request, path_to_reload(body))
    return {"results": [None]}


@vllm_router.post(paths.VLLM_TRANSFER)
async def update_weights(body: TransferBody, request: Request) -> dict[str, str]:
    """Likewise, as prime-rl's trainer asks for it."""
    await _publish(request, path_to_reload(body))
    return {"status": "ok"}


async def _publish(
    request: Request, path: str, label: str | None = None, aborts: bool = False
) -> str:
    weights: ForeignWeights = request.app.state.foreign_weights
    dialect = dialect_of(request)
    place = dialect.pulled.place_of(path)
    work = weights.publish(service_of(request).updates, place, label, aborts)
    published = await unless_disconnected(request, work)
    dialect.model_path = path
    return published


async def _done(work: Awaitable[RelayResponse], text: str) -> Response:
    """The answer to a step of an update."""
    try:
        answer = await work
    except ServiceError as error:
        return failed_update(error)
    shown = "" if text == "Success" else answer.described
    return JSONResponse({"success": True, "message": f"{text} {shown}".rstrip()})


def _relayed(request: Request) -> RelayedUpdates:
    relayed: RelayedUpdates = request.app.state.relayed_updates
    return relayed


def _fleet(request: Request) -> Fleet:
    fleet: Fleet = request.app.state.service.generator
    return fleet
