"""Calls to services that the config allows, and to no others.

A URL is compared after parsing with the allowed prefixes: scheme, host, port and path. The host is then
looked up once per connection, and the connection is made to the address that was checked, so that a name
cannot point elsewhere in between. Addresses that are not public are refused unless `allow_private`;
those that answer for a cloud's metadata always are. No redirect is followed, no proxy of the environment
is used, no cookie is kept, and an answer is bounded in bytes and seconds, and read without a stand-still.
Calls wait for a service that is away (`outages`).

Not covered: what an allowed service does with a call.
"""

from __future__ import annotations

import json
import re
import reprlib
import socket
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from headway.contracts.config.gateway import OutboundConfig
from headway.contracts.errors import BackendError, ConfigError, DataError, Forbidden
from headway.runtime.large_json import parse_json
from headway.runtime.outages import Outages, ServiceUnreachable

KEEP_ALIVE_S = 2.0
"""Shorter than the five seconds after which uvicorn closes a connection, by default."""
CONNECT_S = 5.0
AWAY_STATUSES = (502, 503, 504)
"""What a proxy answers when the service behind it is away, and what one answers that has just started."""
SHOWN_BYTES = 200
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = SHOWN_BYTES

METADATA = frozenset(
    map(ip_address, ("169.254.169.254", "169.254.170.2", "168.63.129.16", "100.100.100.200"))
) | {ip_address("fd00:ec2::254")}
"""Addresses at which clouds answer with credentials: AWS, Azure, Google, Oracle, Alibaba."""
NAT64 = IPv6Network("64:ff9b::/96")
UNSAFE_TEXT = re.compile(r"[\x00-\x20\x7f\\]")
UNSAFE_PATH = re.compile(r"%(?:2f|5c|25|00)", re.IGNORECASE)
"""Separators in disguise: a service that decodes them sees another path than the one that was
compared."""

Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Beginning of an allowed URL."""

    scheme: str
    host: str
    port: int | None
    path: str

    def covers(self, url: URL) -> bool:
        if (url.scheme, url.raw_host, url.port) != (self.scheme, self.host, self.port):
            return False
        below = self.path if self.path.endswith("/") else f"{self.path}/"
        return url.raw_path == self.path or url.raw_path.startswith(below)


class HttpOutbound:
    """`Outbound` over aiohttp; it belongs to the event loop of its first call until `aclose`."""

    def __init__(self, config: OutboundConfig, resolver: AbstractResolver | None = None) -> None:
        """
        Args:
            resolver: looks host names up; None asks the system.

        Raises:
            ConfigError: an allowed prefix is no URL.
        """
        self._config = config
        self._allowed = [_read_prefix(text) for text in config.allow]
        self._resolver = resolver
        self._session: aiohttp.ClientSession | None = None
        self.outages = Outages(config.service_wait_s)

    async def post(self, url: str, body: Any, timeout_s: float) -> Any:
        """See `Outbound`; `timeout_s` is cut to `outbound.timeout_s`.

        Raises:
            Forbidden: the config does not allow this URL, or the address behind it.
            DataError: the body has no JSON form.
            ServiceAway: the service was away for too long.
            BackendError: there was no answer in time, or with something other than JSON and status 200.
        """
        return await self.outages.call(url, partial(self.post_once, url, body, timeout_s))

    async def post_once(self, url: str, body: Any, timeout_s: float) -> Any:
        """See `Outbound`.

        Raises:
            ServiceUnreachable: the service is away.
            ServiceError: as `post`.
        """
        target = self._check(url)
        data = _encode(body)
        total_s = min(timeout_s, self._config.timeout_s)
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_S)
        try:
            async with self._open().post(
                target,
                data=data,
                headers={"content-type": "application/json", "accept-encoding": "identity"},
                allow_redirects=False,
                timeout=timeout,
            ) as answer:
                if answer.status in AWAY_STATUSES:
                    raise ServiceUnreachable(f"{url} answered {answer.status}")
                content = await self._read(url, answer)
                self.outages.end(url)
                return await _decode(url, answer.status, content)
        except aiohttp.ConnectionTimeoutError as error:
            raise ServiceUnreachable(f"no connection to {url} within {CONNECT_S:g} s") from error
        except TimeoutError as error:
            raise BackendError(f"{url} did not answer within {total_s:g} s") from error
        except aiohttp.ClientSSLError as error:
            raise BackendError(f"{url} failed: {type(error).__name__}: {error}") from error
        except (
            aiohttp.ClientConnectionError,
            aiohttp.ClientPayloadError,
            ConnectionError,
        ) as error:
            raise ServiceUnreachable(f"{url} failed: {type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise BackendError(f"{url} failed: {type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _check(self, text: str) -> URL:
        """The URL as it was compared, which is the one that is called."""
        url = _parse(text)
        if url is None or not any(prefix.covers(url) for prefix in self._allowed):
            raise Forbidden(
                f"{text[:500]!r} may not be called: `outbound.allow` of the config has "
                f"{list(self._config.allow)}, and no such prefix covers it"
            )
        if (address := _literal(url)) is not None:
            _check_address(str(url.host), address, self._config.allow_private)
        return url

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            resolver = _GuardedResolver(
                self._resolver or aiohttp.ThreadedResolver(), self._config.allow_private
            )
            connector = aiohttp.TCPConnector(
                resolver=resolver,
                use_dns_cache=False,
                limit=self._config.max_connections,
                keepalive_timeout=KEEP_ALIVE_S,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
            )
        return self._session

    async def _read(self, url: str, answer: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for chunk in answer.content.iter_any():
            content += chunk
            if len(content) > self._config.max_response_bytes:
                raise BackendError(
                    f"{url} answered with more than {self._config.max_response_bytes} bytes; answer "
                    "with less, or raise outbound.max_response_bytes"
                )
        return bytes(content)


class _GuardedResolver(AbstractResolver):
    """Gives out addresses only if every one of a name may be called."""

    def __init__(self, inner: AbstractResolver, allow_private: bool) -> None:
        self._inner = inner
        self._allow_private = allow_private

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        for result in found:
            _check_address(host, ip_address(result["host"]), self._allow_private)
        return found

    async def close(self) -> None:
        await self._inner.close()


def shown(answer: Any) -> str:
    """The beginning of an answer of whatever size, for a message."""
    return _SHOWN.repr(answer)[:SHOWN_BYTES]


def _read_prefix(text: str) -> _Prefix:
    url = _parse(text)
    if url is None or url.raw_query_string:
        raise ConfigError(
            f"outbound.allow has {text!r}; write a prefix like https://rewards.example/v1/: scheme, "
            "host and path, without credentials, query or fragment"
        )
    return _Prefix(url.scheme, str(url.raw_host), url.port, url.raw_path)


def _parse(text: str) -> URL | None:
    """A URL that means the same to everyone who reads it; None for all others."""
    if UNSAFE_TEXT.search(text):
        return None
    try:
        url = URL(text)
        is_plain = (
            url.scheme in ("http", "https")
            and bool(url.raw_host)
            and url.raw_user is None
            and url.raw_password is None
            and not url.raw_fragment
            and not UNSAFE_PATH.search(url.raw_path)
        )
    except ValueError:
        return None
    return url if is_plain else None


def _literal(url: URL) -> Address | None:
    """The address that a URL names itself.

    Raises:
        Forbidden: it is one of the forms that only C libraries read (`127.1`, `2130706433`).
    """
    host = str(url.raw_host)
    try:
        return ip_address(host)
    except ValueError:
        if ":" in host or re.fullmatch(r"(?:0x[0-9a-f]*|\d+)(?:\.(?:0x[0-9a-f]*|\d+))*\.?", host):
            raise Forbidden(f"{host!r} is no plain form of an address; write it out") from None
        return None


def _check_address(host: str, address: Address, allow_private: bool) -> None:
    inner = _unwrap(address)
    if inner in METADATA:
        raise Forbidden(f"{host} is {address}, a cloud's metadata service, which is never called")
    if allow_private:
        return
    is_site_local = isinstance(inner, IPv6Address) and inner.is_site_local
    if not inner.is_global or inner.is_multicast or inner.is_reserved or is_site_local:
        raise Forbidden(
            f"{host} is {address}, which is no public address; set outbound.allow_private if it is meant"
        )


def _unwrap(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one, where there is one."""
    if isinstance(address, IPv4Address):
        return address
    if address in NAT64:
        return IPv4Address(address.packed[-4:])
    teredo = address.teredo[1] if address.teredo else None
    return address.ipv4_mapped or address.sixtofour or teredo or address


def _encode(body: Any) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"what would be sent has no JSON form: {error}") from error


async def _decode(url: str, status: int, content: bytes) -> Any:
    if status != 200:
        follows = "; redirects are not followed" if 300 <= status < 400 else ""
        raise BackendError(f"{url} answered {status}{follows}: {content[:SHOWN_BYTES]!r}")
    try:
        return await parse_json(content)
    except ValueError as error:
        raise BackendError(
            f"{url} answered with no JSON ({error}): {content[:SHOWN_BYTES]!r}"
        ) from error
