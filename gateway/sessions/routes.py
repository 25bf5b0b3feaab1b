"""Sessions over HTTP: an unmodified agent becomes trainable by its base URL and key.

```bash
curl -s $GATEWAY/v1/sessions -H 'content-type: application/json' -d '{"rollout_id": "s1"}'
```

answers with `openai_url`, `anthropic_url`, `end_url` and `api_key`; the agent works there. Who
knows how it went posts `{"reward": 1.0}` to `end_url` with the same key.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from pydantic import ValidationError

from gateway.ledger.base import LedgerReader
from gateway.ledger.records import Entry
from gateway.rewards.given import GIVEN
from gateway.sessions.access import (
    Entered,
    SessionRoute,
    SessionService,
    host_of,
    sessions_of,
)
from gateway.sessions.chat_completions import chat_routes
from gateway.sessions.messages import message_routes
from gateway.sessions.responses import response_routes
from gateway.sessions.sessions import Sessions, later
from headway.contracts.config.base import ComponentConfig, WorkflowRef
from headway.contracts.errors import NotFound, SessionEnded
from headway.contracts.http import paths
from headway.contracts.http.sessions import (
    SessionEndRequest,
    SessionEndResponse,
    SessionRequest,
    SessionResponse,
)
from headway.contracts.types import Prompt, RolloutRequest
from headway.dialects.error_shapes import InvalidField
from headway.runtime.allowed_hosts import AllowedHosts
from headway.runtime.clock import monotonic
from headway.runtime.disconnect import unless_disconnected

RECORD_S = 5.0
"""The end of a session is answered after so long, though its result may not be recorded yet."""
RECORD_POLL_S = 0.01

own_routes = APIRouter(route_class=SessionRoute)


def session_routes() -> APIRouter:
    """Opening and ending, and what agents speak in between."""
    router = APIRouter()
    for part in (own_routes, chat_routes, response_routes, message_routes):
        router.include_router(part)
    return router


@own_routes.post(paths.SESSIONS)
async def open_session(body: SessionRequest, request: Request) -> SessionResponse:
    sessions = sessions_of(request)
    opening = _opened(body, host_of(request), sessions, _called_by(request))
    return await unless_disconnected(request, opening)


@own_routes.get(paths.SESSION)
async def view(session: Entered, request: Request) -> SessionResponse:
    session.check_open()
    return sessions_of(request).describe(session, _called_by(request))


@own_routes.post(paths.SESSION_END)
async def end(body: SessionEndRequest, session: Entered, request: Request) -> SessionEndResponse:
    ledger, rollout_id = host_of(request).ledger, session.sample.rollout_id
    entry = await _entry(ledger, rollout_id)
    session.end(body, is_judged=entry.request.reward.name != GIVEN)
    await session.until_closed()
    if session.sample.prompt.group_size == 1:
        entry = await _recorded(ledger, rollout_id)
    return SessionEndResponse(rollout_id=rollout_id, state=entry.state)


def _called_by(request: Request) -> str | None:
    """The base URL that a client reached this gateway by, if that is one of its own; else None."""
    hosts: AllowedHosts = request.app.state.hosts
    is_ours = hosts.are_ours(request.headers.get("host", "").encode("latin-1"))
    return str(request.base_url) if is_ours else None


async def _opened(
    body: SessionRequest, host: SessionService, sessions: Sessions, base_url: str | None
) -> SessionResponse:
    rollout = _rollout(body)
    if (session := sessions.of_rollout(body.rollout_id)) is not None:
        await host.submit([rollout])  # refuses the same id with other content
        return sessions.describe(session, base_url)
    with sessions.expecting():
        (is_new,) = await host.submit([rollout])
        if not is_new:
            _check_coming(await _entry(host.ledger, body.rollout_id))
        response = await sessions.until_open(body.rollout_id, base_url, body.timeout_s)
    if response is None:
        _check_coming(await _entry(host.ledger, body.rollout_id))
        raise later(
            f"rollout {body.rollout_id!r} was not running within {body.timeout_s:g} s; it keeps its "
            "place in the queue for the same request"
        )
    return response


def _rollout(body: SessionRequest) -> RolloutRequest:
    if "agent_url" in body.args:
        raise InvalidField(
            "an agent that is called needs no session of yours; submit a rollout with the workflow "
            f"`session` to {paths.ROLLOUTS}",
            "args",
        )
    try:
        return RolloutRequest(
            rollout_id=body.rollout_id,
            consumer=body.consumer,
            prompt=Prompt(group_id=body.group_id or body.rollout_id, text="", data=body.data),
            workflow=WorkflowRef(name="session", args=body.args),
            reward=body.reward or ComponentConfig(name=GIVEN),
            gconfig=body.gconfig,
            versions=body.versions,
            sampling_mask=body.sampling_mask,
            routed_experts=body.routed_experts,
        )
    except ValidationError as error:
        raise InvalidField.of(error) from error


def _check_coming(entry: Entry) -> None:
    """Raises `SessionEnded` if the rollout will not be run any more."""
    if entry.state not in ("queued", "leased"):
        reason = f" ({entry.reason})" if entry.reason else ""
        raise SessionEnded(
            f"rollout {entry.request.rollout_id!r} is {entry.state}{reason}; choose another rollout_id"
        )


async def _recorded(ledger: LedgerReader, rollout_id: str) -> Entry:
    """The rollout once the ledger knows what came of it."""
    deadline = monotonic() + RECORD_S
    while (entry := await _entry(ledger, rollout_id)).state == "leased":
        if monotonic() >= deadline:
            break
        await asyncio.sleep(RECORD_POLL_S)
    return entry


async def _entry(ledger: LedgerReader, rollout_id: str) -> Entry:
    entry = await ledger.get(rollout_id)
    if entry is None:
        raise NotFound(f"rollout {rollout_id!r} is not known")
    return entry
