"""Blocking calls to a service, over `httpx`, with the errors of `connections`.

Nothing is retried here: the caller knows whether it may be. Redirects are not followed, and
proxies of the environment are not used.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from headway.runtime.connections import ConnectionBroken, HttpResponse, NotConnected


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits of one request."""

    connect_s: float
    """Seconds until a connection is made."""
    silent_s: float
    """Seconds of silence until the service sends more."""


class BlockingConnections:
    """Kept open between requests; used by any number of threads."""

    def __init__(
        self, context: ssl.SSLContext, headers: Mapping[str, str], keep_alive_s: float
    ) -> None:
        """Args:
        context: for `https` URLs.
        headers: of every request.
        keep_alive_s: unused for longer, a connection is not used again; shorter than servers wait.
        """
        self._client = httpx.Client(
            verify=context,
            headers={
                "content-type": "application/json",
                "accept-encoding": "identity",
                **headers,
            },
            # No thread waits for another one's answer.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=keep_alive_s),
            trust_env=False,
        )

    def ask(self, method: str, url: str, body: bytes | None, timeouts: Timeouts) -> HttpResponse:
        """Send a request, with a JSON body or none, and wait for its answer.

        Raises:
            NotConnected: nothing was sent.
            ConnectionBroken, TimeoutError: it may have been received.
        """
        timeout = httpx.Timeout(timeouts.silent_s, connect=timeouts.connect_s)
        try:
            response = self._client.request(method, url, content=body, timeout=timeout)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            raise NotConnected(f"this is no URL of a service: {error}") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NotConnected(str(error) or type(error).__name__) from error
        except httpx.TimeoutException as error:
            raise TimeoutError(f"no answer within {timeouts.silent_s:g} s") from error
        except httpx.RequestError as error:
            raise ConnectionBroken(f"no whole answer came back: {error}") from error
        is_framed = response.headers.keys() & {"content-length", "transfer-encoding"}
        if not is_framed and response.status_code != httpx.codes.NO_CONTENT:
            raise ConnectionBroken("the answer does not say where it ends, so it may be cut off")
        headers = {name.lower(): value for name, value in response.headers.raw}
        return HttpResponse(response.status_code, headers, response.content)

    def close(self) -> None:
        """Close every connection, for good."""
        self._client.close()
