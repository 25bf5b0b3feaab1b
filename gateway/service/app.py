"""`create_app(service)`: the inference contract over HTTP, the same for a gateway and one server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry

from gateway.consumers.consumers import Publisher
from gateway.service.routes import rollouts, service_of, status_of
from gateway.service.service import RolloutService
from headway import __version__
from headway.contracts.generation_codec import (
    MANY_VALUES,
    MEDIA_TYPE,
    encode_response,
    num_values,
)
from headway.contracts.http import paths
from headway.contracts.http.consumers import (
    ConsumerRequest,
    ConsumerResponse,
    DetachRequest,
    DetachResponse,
)
from headway.contracts.http.ledger import LedgerAudit
from headway.contracts.http.rollouts import ConsumedRequest
from headway.contracts.http.status import StatusResponse
from headway.contracts.http.weights import (
    WeightCancelRequest,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from headway.contracts.types import LLMRequest, LLMResponse, WeightUpdateMeta
from headway.runtime.access import Access
from headway.runtime.allowed_hosts import AllowedHosts
from headway.runtime.disconnect import unless_disconnected
from headway.runtime.http_service import create_service
from headway.runtime.json_route import JsonRoute
from headway.runtime.metrics import METRICS_TYPE, render_metrics
from headway.runtime.offload import offload
from headway.runtime.stalls import StallWatch

log = logging.getLogger(__name__)

OpenService = Callable[[], AbstractAsyncContextManager[RolloutService]]


def create_app(
    title: str,
    open_service: OpenService,
    max_body_bytes: int,
    *routers: APIRouter,
    access: Access | None = None,
    hosts: AllowedHosts | None = None,
    metrics: CollectorRegistry | None = None,
    about: Callable[[str], Mapping[str, str]] | None = None,
) -> FastAPI:
    """An app that opens a service, serves it, and closes it on shutdown.

    Args:
        title: shown in the OpenAPI page.
        open_service: entered on the server's event loop, before the first request.
        max_body_bytes: larger requests get 413.
        routers: routes of this kind of process, besides the common ones.
        access: who may call what; None asks for no token.
        hosts: what it is called by, besides the names that every service has.
        metrics: what this kind of process measures, besides the common metrics.
        about: what the log says, besides URL and release, once it is up at a URL.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.service = await stack.enter_async_context(open_service())
            with StallWatch() as app.state.stalls:
                if (url := getattr(app.state, "url", None)) is not None:
                    more = about(url) if about else {}
                    log.info("%s is up", title, extra={"url": url, "release": __version__, **more})
                yield

    app = create_service(title, lifespan, max_body_bytes, access, hosts)
    app.state.metrics = metrics
    for router in (common, rollouts, *routers):
        app.include_router(router)
    return app


common = APIRouter(route_class=JsonRoute)


@common.post(
    paths.GENERATE, response_model=LLMResponse, responses={200: {"content": {MEDIA_TYPE: {}}}}
)
async def generate(body: LLMRequest, request: Request) -> Response:
    response = await unless_disconnected(request, service_of(request).generator.agenerate(body))
    size = num_values(response)
    if size > MANY_VALUES and MEDIA_TYPE in request.headers.get("accept", ""):
        content = await offload(size, encode_response, response)
        return Response(content, media_type=MEDIA_TYPE)
    return Response(response.model_dump_json(), media_type="application/json")


@common.post(paths.ROLLOUTS_CONSUMED, status_code=204)
async def consumed(body: ConsumedRequest, request: Request) -> None:
    service = service_of(request)
    await service.consumed(body.rollout_ids, body.step, body.checkpoint_step, body.term)


@common.post(paths.CONSUMER)
async def attach(body: ConsumerRequest, request: Request) -> ConsumerResponse:
    service = service_of(request)
    attachment = await service.attach(body)
    return ConsumerResponse(
        given_back=attachment.given_back,
        version=service.generator.version,
        term=attachment.term,
    )


@common.delete(paths.CONSUMER)
async def detach(body: DetachRequest, request: Request) -> DetachResponse:
    return DetachResponse(cancelled=await service_of(request).detach(body.consumer))


@common.post(paths.WEIGHTS)
async def update_weights(body: WeightUpdateRequest, request: Request) -> WeightUpdateResponse:
    meta = WeightUpdateMeta(version=body.version, path=body.path)
    work = service_of(request).updates.update(meta, body.policy, _publisher(body))
    return WeightUpdateResponse(version=await unless_disconnected(request, work))


@common.delete(paths.WEIGHTS)
async def cancel_update(body: WeightCancelRequest, request: Request) -> WeightUpdateResponse:
    updates = service_of(request).updates
    version = await updates.cancel(body.version, body.reason, _publisher(body))
    return WeightUpdateResponse(version=version)


@common.get(paths.STATUS)
async def status(request: Request) -> StatusResponse:
    return await status_of(request)


@common.get(paths.LEDGER)
async def audit(request: Request) -> LedgerAudit:
    return await service_of(request).ledger.audit()


@common.get(paths.METRICS, response_class=Response)
async def metrics(request: Request) -> Response:
    return Response(
        render_metrics(await status_of(request), request.app.state.metrics), media_type=METRICS_TYPE
    )


def _publisher(body: WeightUpdateRequest | WeightCancelRequest) -> Publisher | None:
    return None if body.publisher is None else Publisher(body.publisher, body.term)
