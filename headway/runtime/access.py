"""Access to routes: bearer tokens with roles, and the audit log of what they did.

`http.ACCESS` is the table of routes. A token may call what asks for a role that one of its own includes;
what is not in the table asks for `admin`. Tokens are kept as keyed digests, and a given one is compared
with all of them, so that the time it takes reveals nothing.

Not covered: sessions, which have keys of their own (`gateway.sessions.access`).
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from typing import Self

from headway.contracts.config.gateway import INCLUDED, Role, ServiceConfig
from headway.contracts.errors import ConfigError, Forbidden, ServiceError, Unauthorized
from headway.contracts.http.paths import ACCESS, OPEN_PATHS, OPEN_PREFIXES, ROUTINE
from headway.runtime.secret import SCHEME, bearer_of, read_token

audit = logging.getLogger("headway.audit")

NOBODY = "nobody"
ANYONE = "anyone"
"""Caller of a service that asks for no token."""
UNKNOWN_ROUTE = "(unknown)"


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token and what it may do."""

    name: str
    secret: str
    roles: tuple[Role, ...]
    consumers: frozenset[str] = frozenset()
    """Names that it may use though another token owns them."""

    def __repr__(self) -> str:
        return f"Token({self.name!r}, {self.roles!r})"

    def may(self, role: Role) -> bool:
        """True if it may call routes that ask for this role."""
        return any(role in INCLUDED[each] for each in self.roles)


TOKEN: ContextVar[Token | None] = ContextVar("token", default=None)
"""Token of the current request; None for one that needed none."""


@dataclass(frozen=True, slots=True)
class AccessDecision:
    """Decision about one request."""

    route: str
    """Route, as `METHOD path` of the table: one of few, whatever was asked."""
    role: Role | None
    """Role that the route asks for; None for open ones."""
    caller: str = ANYONE
    """Name of the token."""
    refusal: ServiceError | None = None
    token: Token | None = None
    """Token that came with the request; None where no token is asked for."""

    @property
    def is_audited(self) -> bool:
        """True if it is written to the audit log: refusals, and what changes something beyond
        submissions."""
        if self.refusal is not None:
            return True
        is_reading = self.route.startswith("GET ")
        return self.role not in (None, "submit") and not is_reading and self.route not in ROUTINE


class Access:
    """The tokens of one service; without any, everybody may do everything."""

    def __init__(self, tokens: Sequence[Token] = ()) -> None:
        """
        Raises:
            ConfigError: two tokens have the same text.
        """
        if len({token.secret for token in tokens}) < len(tokens):
            names = ", ".join(token.name for token in tokens)
            raise ConfigError(f"two of the tokens {names} have the same text; make each its own")
        self._key = secrets.token_bytes(32)
        self._tokens = [(self._digest(token.secret.encode()), token) for token in tokens]

    @classmethod
    def of(cls, token: str | None) -> Self:
        """One token with every role; None asks for none."""
        return cls(() if token is None else (Token("default", token, ("admin",)),))

    @classmethod
    def from_config(cls, config: ServiceConfig) -> Self:
        """The tokens that the environment holds.

        Raises:
            ConfigError: as `read_token` and the constructor.
        """
        tokens = [
            Token(each.name, read_token(each.env), each.roles, frozenset(each.consumers))
            for each in config.tokens
        ]
        if config.token_env is not None:
            tokens.append(Token("default", read_token(config.token_env), ("admin",)))
        return cls(tokens)

    def admit(self, method: str, path: str, authorization: bytes) -> AccessDecision:
        """Look at a request before anybody reads it; `path` is percent-decoded."""
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
            return _OPEN
        asked = _ROUTES.get(f"{method} {path}") or _match(method, path)
        if not self._tokens:
            return asked
        role = asked.role or "admin"
        token = self._find(bearer_of(authorization))
        if token is None:
            seen = "a wrong token" if authorization else "no token"
            return AccessDecision(asked.route, role, NOBODY, _unauthorized(seen))
        if not token.may(role):
            error = Forbidden(
                f"{asked.route} asks for the role {role}; the token {token.name} has "
                f"{', '.join(token.roles)}"
            )
            return AccessDecision(asked.route, role, token.name, error)
        return AccessDecision(asked.route, role, token.name, token=token)

    def _find(self, given: bytes) -> Token | None:
        digest = self._digest(given)
        found = None
        for known, token in self._tokens:
            if compare_digest(known, digest):
                found = token
        return found

    def _digest(self, secret: bytes) -> bytes:
        return blake2b(secret, key=self._key, digest_size=32).digest()


def note_audit(admission: AccessDecision, request_id: str, client: str, status: int) -> None:
    """Write the audit line of a request that has been answered."""
    audit.info(
        "refused" if admission.refusal is not None else "called",
        extra={
            "caller": admission.caller,
            "asked_role": admission.role,
            "route": admission.route,
            "request_id": request_id,
            "client": client,
            "status": status,
        },
    )


def _unauthorized(seen: str) -> Unauthorized:
    return Unauthorized(
        f"the request carries {seen}; send `{SCHEME} TOKEN` in its authorization header"
    )


def _pattern(path: str) -> re.Pattern[str]:
    """Return the pattern that a path with parameters matches; a model's name may have slashes."""
    return re.compile(re.sub(r"\{(\w+)\}", lambda m: _PARAMETER.get(m[1], "[^/]+"), path))


_PARAMETER = {"model": ".+"}
_OPEN = AccessDecision("(open)", None)
_UNKNOWN = AccessDecision(UNKNOWN_ROUTE, "admin")
_ROUTES = {route: AccessDecision(route, role) for route, role in ACCESS.items()}
_PATTERNS = [
    (method, _pattern(path), admission)
    for route, admission in _ROUTES.items()
    for method, _, path in (route.partition(" "),)
    if "{" in path
]


def _match(method: str, path: str) -> AccessDecision:
    """The entry of a path with parameters, and of a HEAD that is a GET without its body."""
    wanted = "GET" if method == "HEAD" else method
    if (known := _ROUTES.get(f"{wanted} {path}")) is not None:
        return known
    for each, pattern, admission in _PATTERNS:
        if each == wanted and pattern.fullmatch(path):
            return admission
    return _UNKNOWN
