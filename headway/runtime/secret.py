"""Bearer tokens: named in a config, held by the environment, read once where a process starts."""

from __future__ import annotations

import os
from hmac import compare_digest
from typing import overload

from headway.contracts.errors import ConfigError

SCHEME = "Bearer"


@overload
def read_token(variable: str) -> str: ...
@overload
def read_token(variable: str | None) -> str | None: ...
def read_token(variable: str | None) -> str | None:
    """The token that an environment variable holds; None where none is named.

    Raises:
        ConfigError: the variable is unset or empty, or its text cannot stand in a header.
    """
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigError(
            f"token_env names {variable}, which is not set; export it, or unset token_env"
        )
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(f"the token in {variable} holds blanks or characters beyond ASCII")
    return token


def authorization(token: str | None) -> dict[str, str]:
    """The headers that carry a token."""
    return {} if token is None else {"authorization": f"{SCHEME} {token}"}


def bearer_of(header: bytes) -> bytes:
    """The token in an `authorization` header; empty if there is none."""
    scheme, _, given = header.partition(b" ")
    return given.strip() if scheme.lower() == SCHEME.lower().encode() else b""


def is_authorized(header: bytes, token: str) -> bool:
    """True if an `authorization` header carries the token; takes as long for any wrong one."""
    return compare_digest(bearer_of(header), token.encode())
