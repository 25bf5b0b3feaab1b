"""Authentication of session requests: by the session in the path, if the request carries its
key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

from fastapi import Depends, Request

from gateway.ledger.base import LedgerReader
from gateway.sessions.session import Session
from gateway.sessions.sessions import Sessions
from headway.contracts.errors import ConfigError, Unauthorized
from headway.contracts.types import RolloutRequest
from headway.runtime.json_route import JsonRoute


class SessionService(Protocol):
    """Part that the routes need of the service behind an app (`app.state.service`)."""

    @property
    def sessions(self) -> Sessions | None:
        """Sessions of the service; None if it keeps none."""

    @property
    def ledger(self) -> LedgerReader:
        """Ledger that records its rollouts."""

    async def submit(self, requests: Sequence[RolloutRequest]) -> list[bool]:
        """Queue rollouts; whether each was new."""


def host_of(request: Request) -> SessionService:
    """The service behind an app."""
    host: SessionService = request.app.state.service
    return host


def sessions_of(request: Request) -> Sessions:
    """Return the service's sessions."""
    sessions = host_of(request).sessions
    if sessions is None:
        raise ConfigError("this service keeps no sessions; ask a gateway")
    return sessions


def enter(request: Request) -> None:
    """Let in who has the key of the session in the path.

    Raises:
        Unauthorized: no key, or another one.
        NotFound: no such session.
    """
    session_id = request.path_params.get("session_id")
    if session_id is None:
        return
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    key = bearer if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    if not key:
        raise Unauthorized("the request carries no key; send the session's api_key")
    request.state.session = sessions_of(request).find(session_id, key.strip())


class SessionRoute(JsonRoute):
    """Asks for the key before it reads the body."""

    def admit(self, request: Request) -> None:
        enter(request)


async def entered_session(session_id: str, request: Request) -> Session:
    """The session that `enter` found."""
    session: Session = request.state.session
    return session


Entered = Annotated[Session, Depends(entered_session)]
