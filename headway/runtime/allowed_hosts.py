"""Names by which a service may be called, and web pages that may call it.

A browser inside a network can be made to send requests by any page: to the page's own name, resolved to
a service's address, or across origins. The first carries a foreign `Host`, the second an `Origin` or
`Sec-Fetch-Site` that says so. A page knows no token: who brought one may use any name.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

ANY = "*"
FOREIGN_SITES = (b"cross-site", b"same-site")
CHANGING = ("POST", "PUT", "PATCH", "DELETE")
SINGLE = (b"authorization", b"x-api-key", b"host", b"origin", b"content-type")
"""Headers that may occur once: with a second one it would be chance which counts."""
MAX_SHOWN = 128
"""Characters of a header in a refusal."""
NUM_REMEMBERED = 256


class Refusal(NamedTuple):
    """Why a request is not served."""

    status: int
    code: str
    message: str


class AllowedHosts:
    """The names of one service."""

    def __init__(self, allowed: Collection[str] = (), urls: Collection[str | None] = ()) -> None:
        """
        Args:
            allowed: `service.allowed_hosts`.
            urls: that the service is reached by; None is none.
        """
        self._named = {name.lower() for name in allowed}
        self._named |= {urlsplit(url).hostname or "" for url in urls if url is not None}
        self._machine = socket.gethostname().lower()
        self.are_ours = lru_cache(NUM_REMEMBERED)(self._are_ours)

    def refusal(
        self, method: str, headers: Mapping[bytes, bytes], is_free: bool, is_page: bool
    ) -> Refusal | None:
        """Why a request is not served; None if it is.

        Args:
            method: of the request.
            headers: by their lower-case names.
            is_free: it carries a secret, so its `Host` may be anything.
            is_page: links from other sites may lead there.
        """
        host = headers.get(b"host", b"")
        if host and not is_free and not self.are_ours(host):
            return Refusal(
                403,
                "forbidden",
                f"the request is for the host {_shown(host)}, which is no name of this service; if it "
                "is, add it to service.allowed_hosts",
            )
        origin = headers.get(b"origin")
        if origin is not None and not self._is_own(origin, host):
            return _foreign(f"a page of {_shown(origin)}")
        if origin is None and not is_page and headers.get(b"sec-fetch-site") in FOREIGN_SITES:
            return _foreign("a page of another origin")
        kind = headers.get(b"content-type")
        if kind is not None and method in CHANGING and not _is_json(kind):
            return Refusal(
                400,
                "invalid_request",
                f"the content type is {_shown(kind)}; send application/json, or no body and no type",
            )
        return None

    def _are_ours(self, host: bytes) -> bool:
        """True if a `Host` header names this service."""
        name = _name_of(host.decode("latin-1"))
        return name is not None and (
            ANY in self._named
            or "." not in name  # of this network: a page's name has a dot
            or name.endswith(".localhost")
            or name == self._machine
            or _is_address(name)
            or self._is_named(name)
        )

    def _is_named(self, name: str) -> bool:
        return name in self._named or any(
            each.startswith(".") and name.endswith(each) for each in self._named
        )

    def _is_own(self, origin: bytes, host: bytes) -> bool:
        scheme, separator, authority = origin.decode("latin-1").lower().partition("://")
        if not separator or scheme not in ("http", "https"):
            return False
        name = _name_of(authority)
        is_named = name is not None and (ANY in self._named or self._is_named(name))
        return is_named or authority.encode("latin-1") == host.lower()


def repeated(headers: Collection[tuple[bytes, bytes]]) -> Refusal | None:
    """Return why repeated headers are refused where only one counts."""
    names = [name for name, _ in headers]
    for name in SINGLE:
        if names.count(name) > 1:
            return Refusal(
                400,
                "invalid_request",
                f"the request has {names.count(name)} {name.decode()} headers; send one",
            )
    return None


def _name_of(authority: str) -> str | None:
    """The name, or the address, before a port; None if it is none."""
    try:
        name = urlsplit(f"//{authority}").hostname
    except ValueError:
        return None
    return name.removesuffix(".") if name else None


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_json(kind: bytes) -> bool:
    essence = kind.partition(b";")[0].strip().lower()
    return essence == b"application/json" or (
        essence.startswith(b"application/") and essence.endswith(b"+json")
    )


def _foreign(whose: str) -> Refusal:
    return Refusal(
        403,
        "forbidden",
        f"the request comes from {whose}, which is not this service's; add its host to "
        "service.allowed_hosts if it may call it",
    )


def _shown(header: bytes) -> str:
    return repr(header[:MAX_SHOWN].decode("latin-1"))
