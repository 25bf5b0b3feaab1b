"""The URL of a Redis ledger."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from headway.contracts.errors import ConfigError

DEFAULT_PREFIX = "headway"
PREFIX = re.compile(r"[A-Za-z0-9._{}-]{1,64}")

SECRET = re.compile(r"//[^/]*@")


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a ledger."""

    url: str
    """URL for redis-py; may hold a password."""
    prefix: str
    """Prefix of every key; a run has its own, or shares it with the gateways that share the
    ledger."""
    shown: str
    """Address for messages: without the password."""


def parse_address(url: str) -> Address:
    """Split `redis://HOST:PORT/DB?prefix=NAME`.

    Raises:
        ConfigError: a prefix that is no name.
    """
    base, _, text = url.partition("?")
    query = dict(parse_qsl(text, keep_blank_values=True))
    prefix = query.pop("prefix", DEFAULT_PREFIX)
    if not PREFIX.fullmatch(prefix):
        raise ConfigError(f"ledger prefix {prefix!r} must match {PREFIX.pattern}")
    return Address(
        url=f"{base}?{urlencode(query)}" if query else base,
        prefix=prefix,
        shown=f"{SECRET.sub('//', base)}?prefix={prefix}",
    )
