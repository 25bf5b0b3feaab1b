"""Weights that somebody else's trainer publishes, in SGLang's or vLLM's words: one transaction each.

Servers read the directory that it names, so it is on a disk that all of them have. A server that joins
later reads it too, and is turned away if it holds another version by then.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.app.fleet import Fleet
from gateway.publishing.updates import WeightUpdates
from gateway.service.routes import service_of
from headway.contracts.errors import ServiceError
from headway.contracts.http import paths
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from headway.dialects.error_shapes import FAILURES, InvalidField, route_in
from headway.dialects.openai.errors import openai_error
from headway.dialects.served_model import served_model
from headway.dialects.sglang.errors import UPDATE_FAILURES, failed_update, sglang_error
from headway.dialects.sglang.routes import dialect_of
from headway.dialects.sglang.types import DiskUpdateBody, EmptyBody, RelabelBody
from headway.dialects.sglang.version_labels import START_LABEL, next_version
from headway.dialects.vllm.types import CollectiveCallBody, path_to_reload
from headway.runtime.disconnect import unless_disconnected

router = APIRouter(route_class=route_in(sglang_error), responses=FAILURES)
SCHEME = "model://"
vllm_router = APIRouter(route_class=route_in(openai_error), responses=FAILURES)


class ForeignWeights:
    """Publications of a trainer that names versions by text, or not at all."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = asyncio.Lock()

    @property
    def newest_path(self) -> str | None:
        """Directory of the version that was published last, if it was published from one."""
        path = self._fleet.weights.newest_path
        return None if path is None or not path.startswith(SCHEME) else path.removeprefix(SCHEME)

    def label(self, version: PolicyVersion) -> str:
        """The text by which clients know a version."""
        return self._fleet.weights.label(version) or (str(version) if version else START_LABEL)

    async def publish(
        self, updates: WeightUpdates, path: str, label: str | None, aborts: bool
    ) -> str:
        """Publish a directory on every server; return the label of what serves then.

        Args:
            label: of the version; None names it by its number.
            aborts: end running sequences; false leaves it to the servers' policy.
        Raises:
            ServiceError: it was not published; the old version serves on.
        """
        async with self._lock:
            version = next_version(label, self._fleet.head)
            meta = WeightUpdateMeta(version, SCHEME + path, label=label)
            serving = await updates.update(meta, "abort" if aborts else None)
        return self.label(serving)


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
    """Name the version that serves, also in the spans of tokens that it sampled before."""
    if body.abort_all_requests:
        await served_model(request).abort(None)
    await _fleet(request).weights.rename(body.new_version)
    text = f"Weight version updated to {body.new_version}"
    return {"success": True, "message": text, "new_version": body.new_version}


@router.post(paths.SGLANG_CONTINUE, response_model=None)
async def resume(_: EmptyBody, request: Request) -> dict[str, str]:
    await served_model(request).resume()
    return {"message": "Generation continued successfully.", "status": "ok"}


@router.post(paths.SGLANG_GROUP_INIT)
@router.post(paths.SGLANG_GROUP_DESTROY)
@router.post(paths.SGLANG_UPDATE_GROUP)
@router.post(paths.SGLANG_UPDATE_BEGIN)
@router.post(paths.SGLANG_UPDATE_END)
async def refuse_groups() -> None:
    """Refused: a group of SGLang's has one server in it."""
    raise InvalidField(
        "a gateway takes versions by update_weights_from_disk, or by POST /v1/weights from a process "
        "group of our own; process groups of SGLang's have single servers in them"
    )


@vllm_router.post(paths.VLLM_CALL)
async def reload_weights(body: CollectiveCallBody, request: Request) -> dict[str, Any]:
    """Likewise, as vLLM's clients ask for it."""
    await _publish(request, path_to_reload(body))
    return {"results": [None]}


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


def _fleet(request: Request) -> Fleet:
    fleet: Fleet = request.app.state.service.generator
    return fleet
