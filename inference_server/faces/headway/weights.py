"""The receiving side of a publication: prepare, commit, abort."""

from __future__ import annotations

from fastapi import APIRouter, Request

from headway.contracts import http
from headway.runtime.disconnect import unless_disconnected
from headway.runtime.json_route import JsonRoute
from inference_server.version_gate import VersionGate

router = APIRouter(route_class=JsonRoute)


@router.post(http.WEIGHTS_PREPARE)
async def prepare(body: http.WeightPrepareRequest, request: Request) -> http.WeightPrepareResponse:
    digest = await unless_disconnected(request, _gate(request).prepare(body))
    return http.WeightPrepareResponse(version=body.version, digest=digest)


@router.post(http.WEIGHTS_COMMIT)
async def commit(body: http.WeightCommitRequest, request: Request) -> http.WeightUpdateResponse:
    return await _gate(request).commit(body)


@router.post(http.WEIGHTS_ABORT, status_code=204)
async def abort(body: http.WeightAbortRequest, request: Request) -> None:
    _gate(request).abort(body)


def _gate(request: Request) -> VersionGate:
    gate: VersionGate = request.app.state.service.generator.gate
    return gate
