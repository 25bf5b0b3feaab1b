"""Who a request is from: the session in its path, if it carries that session's key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

from fastapi import Depends, Request

from headway.contracts.errors import ConfigError, Unauthorized
from headway.contracts.types import RolloutRequest
from headway.rollout.ledger.base import Ledger
from headway.rollout.sessions.session import Session
from headway.rollout.sessions.sessions import Sessions


class Host(Protocol):
    """What the routes need of the service behind an app (`app.state.service`)."""

    @property
    def sessions(self) -> Sessions | None:
        """None if it keeps none."""

    @property
    def ledger(self) -> Ledger:
        """Where its rollouts are recorded."""

    async def submit(self, requests: Sequence[RolloutRequest]) -> list[bool]:
        """Queue rollouts; whether each was new."""


def host_of(request: Request) -> Host:
    """The service behind an app."""
    host: Host = request.app.state.service
    return host


def sessions_of(request: Request) -> Sessions:
    """Its sessions."""
    sessions = host_of(request).sessions
    if sessions is None:
        raise ConfigError("this service keeps no sessions; ask a gateway")
    return sessions


async def entered_session(session_id: str, request: Request) -> Session:
    """The session of a path, for who has its key.

    Raises:
        Unauthorized: no key, or another one.
        NotFound: no such session.
    """
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    key = bearer if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    if not key:
        raise Unauthorized("the request carries no key; send the session's api_key")
    return sessions_of(request).find(session_id, key.strip())


Entered = Annotated[Session, Depends(entered_session)]
