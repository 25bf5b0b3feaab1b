"""Submission and results of rollouts, over HTTP: thin functions over `RolloutService`.

```bash
curl -s $GATEWAY/v1/rollouts -H 'content-type: application/json' -d '{"rollouts": [{"rollout_id": "r1",
  "prompt": {"group_id": "g1", "group_size": 4, "text": "2 + 2 =", "data": {"answer": "4"}},
  "reward": {"name": "exact"}}]}'
curl -s $GATEWAY/v1/rollouts/wait -H 'content-type: application/json' -d '{"delivery_id": "d1",
  "count": 1, "rollout_ids": ["r1"], "format": "json"}'
```
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from gateway.service.catalog import filter_views, reward_views, tool_views, workflow_views
from gateway.service.service import RolloutService
from gateway.service.views import batch_json, group_texts, rollout_view, score_view, summary
from headway.contracts.codec import MEDIA_TYPE, join_payloads
from headway.contracts.config.base import Identifier
from headway.contracts.errors import NotFound, ServiceError
from headway.contracts.http import paths
from headway.contracts.http.components import ComponentList
from headway.contracts.http.rewards import ScoreRequest, ScoreResponse
from headway.contracts.http.rollouts import (
    BatchView,
    CancelRequest,
    CancelResponse,
    RequeueRequest,
    RequeueResponse,
    RolloutDetail,
    RolloutList,
    RolloutState,
    RolloutView,
    SubmitRequest,
    SubmitResponse,
    WaitRequest,
)
from headway.contracts.http.status import StatusResponse
from headway.runtime.disconnect import unless_disconnected
from headway.runtime.json_route import JsonRoute
from headway.runtime.offload import offload
from headway.runtime.stalls import StallWatch

JSON = "application/json"
STREAM_POLL_S = 15.0
"""A stream without news sends a comment so often, which keeps proxies from closing it."""

rollouts = APIRouter(route_class=JsonRoute)


def service_of(request: Request) -> RolloutService:
    """The service behind an app."""
    service: RolloutService = request.app.state.service
    return service


async def status_of(request: Request) -> StatusResponse:
    """Return the service's status, and its process's."""
    stalls: StallWatch = request.app.state.stalls
    status = await service_of(request).status()
    measured = {"longest_stall_s": stalls.longest_s, "stalls": stalls.num_long}
    return status.model_copy(update=measured)


@rollouts.post(paths.ROLLOUTS)
async def submit(body: SubmitRequest, request: Request) -> SubmitResponse:
    return SubmitResponse(new=await service_of(request).submit(body.rollouts))


WAITED: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {}, JSON: {"schema": BatchView.model_json_schema()}}},
    204: {"description": "Nothing within `timeout_s`"},
}


@rollouts.post(paths.ROLLOUTS_WAIT, response_class=Response, responses=WAITED)
async def wait(body: WaitRequest, request: Request) -> Response:
    payloads, num_ready = await unless_disconnected(request, service_of(request).wait(body))
    if payloads is None:
        return Response(status_code=204, headers={paths.READY_HEADER: str(num_ready)})
    if body.format == "json":
        size = sum(map(len, payloads))
        text = await offload(size, batch_json, payloads, service_of(request).tokenizer)
        return Response(text, media_type=JSON)
    return Response(join_payloads(payloads), media_type=MEDIA_TYPE)


@rollouts.get(paths.ROLLOUTS_STREAM, response_class=StreamingResponse)
async def stream(
    request: Request,
    stream_id: Annotated[Identifier, Query()],
    consumer: Annotated[Identifier, Query()] = "default",
) -> StreamingResponse:
    """Finished groups as server-sent events, oldest submission first, each a `GroupView`.

    Event ids count from 0; a client that reconnects with the same `stream_id` and the
    `Last-Event-ID` it saw gets what it may have missed.
    """
    last = request.headers.get("last-event-id", "")
    first = int(last) + 1 if last.isdigit() and len(last) < 16 else 0
    events = _events(service_of(request), stream_id, consumer, first)
    return StreamingResponse(events, media_type="text/event-stream")


async def _events(
    service: RolloutService, stream_id: str, consumer: str, number: int
) -> AsyncIterator[str]:
    while True:
        body = WaitRequest(
            delivery_id=f"{stream_id[:100]}:{number}",
            count=1,
            timeout_s=STREAM_POLL_S,
            consumer=consumer,
        )
        try:
            payloads, _ = await service.wait(body)
        except ServiceError as error:
            yield f"event: error\ndata: {error.to_body().model_dump_json()}\n\n"
            return
        if payloads is None:
            yield ": nothing is ready\n\n"
            continue
        size = sum(map(len, payloads))
        (text,) = await offload(size, group_texts, payloads, service.tokenizer)
        yield f"id: {number}\nevent: group\ndata: {text}\n\n"
        number += 1


@rollouts.post(paths.ROLLOUTS_CANCEL)
async def cancel(body: CancelRequest, request: Request) -> CancelResponse:
    cancelled = await service_of(request).cancel(body.rollout_ids, body.reason)
    return CancelResponse(cancelled=cancelled)


@rollouts.get(paths.ROLLOUTS)
async def listing(
    request: Request,
    state: Annotated[RolloutState | None, Query()] = None,
    consumer: Annotated[Identifier | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[Identifier | None, Query()] = None,
) -> RolloutList:
    entries = await service_of(request).ledger.find(state, consumer, limit, before)
    more = entries[-1].request.rollout_id if len(entries) == limit else None
    return RolloutList(rollouts=[summary(entry) for entry in entries], before=more)


@rollouts.post(paths.LEDGER_REQUEUE)
async def requeue(body: RequeueRequest, request: Request) -> RequeueResponse:
    return RequeueResponse(requeued=await service_of(request).requeue(body.rollout_ids))


@rollouts.get(paths.WORKFLOWS)
async def workflows() -> ComponentList:
    return ComponentList(parts=workflow_views())


@rollouts.get(paths.REWARDS)
async def rewards() -> ComponentList:
    return ComponentList(parts=reward_views())


@rollouts.post(paths.REWARDS_SCORE)
async def score(body: ScoreRequest, request: Request) -> ScoreResponse:
    work = service_of(request).batch_scorer.score(body.reward, body.answers)
    judged = await unless_disconnected(request, work)
    return ScoreResponse(results=[score_view(each) for each in judged])


@rollouts.get(paths.FILTERS)
async def filters() -> ComponentList:
    return ComponentList(parts=filter_views())


@rollouts.get(paths.TOOLS)
async def tools() -> ComponentList:
    return ComponentList(parts=tool_views())


@rollouts.get(paths.ROLLOUT)
async def rollout(
    rollout_id: Identifier, request: Request, view: Annotated[RolloutDetail, Query()] = "full"
) -> RolloutView:
    """Everything about a rollout; `view=summary` leaves out the result, which can be megabytes."""
    service = service_of(request)
    entry = await service.ledger.get(rollout_id, with_payload=view == "full")
    if entry is None:
        raise NotFound(f"no rollout {rollout_id!r} in the ledger")
    events = await service.ledger.events(rollout_id)
    size = len(entry.payload or b"")
    return await offload(size, rollout_view, entry, events, service.tokenizer)
