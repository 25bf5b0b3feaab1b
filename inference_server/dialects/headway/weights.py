"""The receiving side of a publication: prepare, commit, abort."""

from __future__ import annotations

from fastapi import APIRouter, Request

from headway.contracts.http import paths
from headway.contracts.http.weights import (
    WeightAbortRequest,
    WeightCommitRequest,
    WeightPrepareRequest,
    WeightPrepareResponse,
    WeightUpdateResponse,
)
from headway.runtime.disconnect import unless_disconnected
from headway.runtime.json_route import JsonRoute
from inference_server.version_gate import VersionGate

router = APIRouter(route_class=JsonRoute)


@router.post(paths.WEIGHTS_PREPARE)
async def prepare(body: WeightPrepareRequest, request: Request) -> WeightPrepareResponse:
    digest = await unless_disconnected(request, _gate(request).prepare(body))
    return WeightPrepareResponse(version=body.version, digest=digest)


@router.post(paths.WEIGHTS_COMMIT)
async def commit(body: WeightCommitRequest, request: Request) -> WeightUpdateResponse:
    return await _gate(request).commit(body)


@router.post(paths.WEIGHTS_ABORT, status_code=204)
async def abort(body: WeightAbortRequest, request: Request) -> None:
    _gate(request).abort(body)


def _gate(request: Request) -> VersionGate:
    gate: VersionGate = request.app.state.service.generator.gate
    return gate
