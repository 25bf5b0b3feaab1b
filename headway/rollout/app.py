"""`create_app(service)`: the inference contract over HTTP, the same for a gateway and one server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect

from headway.contracts import http
from headway.contracts.codec import MEDIA_TYPE, decode_groups, encode_groups
from headway.contracts.types import LLMRequest, LLMResponse, WeightUpdateMeta
from headway.rollout.service import Publisher, RolloutService
from headway.runtime.http_service import create_service
from headway.runtime.metrics import METRICS_TYPE, render_metrics

OpenService = Callable[[], AbstractAsyncContextManager[RolloutService]]


def create_app(
    title: str,
    open_service: OpenService,
    max_body_bytes: int,
    *routers: APIRouter,
    token: str | None = None,
    metrics: CollectorRegistry | None = None,
) -> FastAPI:
    """An app that opens a service, serves it, and closes it on shutdown.

    Args:
        title: shown in the OpenAPI page.
        open_service: entered on the server's event loop, before the first request.
        max_body_bytes: larger requests get 413.
        routers: routes of this kind of process, besides the common ones.
        token: what every request must carry; None asks for nothing.
        metrics: what this kind of process measures, besides the common figures.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_service() as service:
            app.state.service = service
            yield

    app = create_service(title, lifespan, max_body_bytes, token)
    app.state.metrics = metrics
    for router in (common, *routers):
        app.include_router(router)
    return app


T = TypeVar("T")
common = APIRouter()


@common.post(http.GENERATE, response_model=LLMResponse)
async def generate(body: LLMRequest, request: Request) -> Response:
    response = await unless_disconnected(request, _service(request).agenerate(body))
    return Response(response.model_dump_json(), media_type="application/json")


@common.post(http.ROLLOUTS)
async def submit(body: http.SubmitRequest, request: Request) -> http.SubmitResponse:
    return http.SubmitResponse(new=await _service(request).submit(body.rollouts))


@common.post(http.ROLLOUTS_WAIT, response_class=Response)
async def wait(body: http.WaitRequest, request: Request) -> Response:
    payloads, num_ready = await unless_disconnected(request, _service(request).wait(body))
    if payloads is None:
        return Response(status_code=204, headers={http.READY_HEADER: str(num_ready)})
    groups = [group for payload in payloads for group in decode_groups(payload)]
    return Response(encode_groups(groups), media_type=MEDIA_TYPE)


@common.post(http.ROLLOUTS_CONSUMED, status_code=204)
async def consumed(body: http.ConsumedRequest, request: Request) -> None:
    await _service(request).consumed(body.rollout_ids, body.step, body.checkpoint_step)


@common.post(http.CONSUMER)
async def attach(body: http.ConsumerRequest, request: Request) -> http.ConsumerResponse:
    service = _service(request)
    attachment = await service.attach(body)
    return http.ConsumerResponse(
        given_back=attachment.given_back,
        version=service.generator.version,
        term=attachment.term,
    )


@common.delete(http.CONSUMER)
async def detach(body: http.DetachRequest, request: Request) -> http.DetachResponse:
    return http.DetachResponse(cancelled=await _service(request).detach(body.consumer))


@common.post(http.WEIGHTS)
async def update_weights(
    body: http.WeightUpdateRequest, request: Request
) -> http.WeightUpdateResponse:
    meta = WeightUpdateMeta(version=body.version, path=body.path)
    work = _service(request).update_weights(meta, body.policy, _publisher(body))
    return http.WeightUpdateResponse(version=await unless_disconnected(request, work))


@common.delete(http.WEIGHTS)
async def cancel_update(
    body: http.WeightCancelRequest, request: Request
) -> http.WeightUpdateResponse:
    service = _service(request)
    version = await service.cancel_update(body.version, body.reason, _publisher(body))
    return http.WeightUpdateResponse(version=version)


@common.get(http.STATUS)
async def status(request: Request) -> http.StatusResponse:
    return await _service(request).status()


@common.get(http.LEDGER)
async def audit(request: Request) -> http.LedgerAudit:
    return await _service(request).audit()


@common.get(http.METRICS, response_class=Response)
async def metrics(request: Request) -> Response:
    status = await _service(request).status()
    return Response(render_metrics(status, request.app.state.metrics), media_type=METRICS_TYPE)


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, and cancel it when the client goes away (the server would not).

    Raises:
        ClientDisconnect: it went away; the application answers nobody.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _publisher(body: http.WeightUpdateRequest | http.WeightCancelRequest) -> Publisher | None:
    return None if body.publisher is None else Publisher(body.publisher, body.term)


def _service(request: Request) -> RolloutService:
    service: RolloutService = request.app.state.service
    return service
