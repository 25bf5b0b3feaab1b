"""The receiving side of a publication: prepare, commit, abort."""

from __future__ import annotations

from fastapi import APIRouter, Request

from headway.contracts import http
from headway.contracts.types import WeightUpdateMeta
from inference_server.version_gate import VersionGate

router = APIRouter()


@router.post(http.WEIGHTS_PREPARE)
async def prepare(body: http.WeightUpdateRequest, request: Request) -> http.WeightUpdateResponse:
    await _gate(request).prepare(WeightUpdateMeta(version=body.version, path=body.path))
    return http.WeightUpdateResponse(version=body.version)


@router.post(http.WEIGHTS_COMMIT)
async def commit(body: http.WeightUpdateRequest, request: Request) -> http.WeightUpdateResponse:
    running = await _gate(request).commit(body.version, body.policy)
    return http.WeightUpdateResponse(version=body.version, running=running)


@router.post(http.WEIGHTS_ABORT, status_code=204)
async def abort(body: http.WeightAbortRequest, request: Request) -> None:
    await _gate(request).abort(body.version)


def _gate(request: Request) -> VersionGate:
    gate: VersionGate = request.app.state.service.generator.gate
    return gate
