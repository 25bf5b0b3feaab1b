"""Blocking calls to a service that may restart, or to the next of those that share its ledger."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from pydantic import BaseModel
from pydantic_core import to_json
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_when_event_set,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from headway.contracts.errors import BackendError, ConfigError, ServiceError
from headway.runtime.blocking import BlockingConnections, Timeouts
from headway.runtime.connections import HttpResponse
from headway.runtime.secret import authorization
from headway.runtime.server_calls import error_of
from headway.runtime.tls import client_context
from headway.runtime.wait_notice import WaitNotice

KEEP_ALIVE_S = 15.0
CONNECT_S = 5.0
SHORTEST_S = 0.05
WORKED_ON_S = 10.0
"""An attempt that lasted longer than it takes to connect had reached the service."""


class ServiceCalls:
    """Requests that are tried again, with jitter: each must be idempotent."""

    def __init__(
        self,
        urls: Sequence[str],
        connect_timeout_s: float,
        request_timeout_s: float,
        token: str | None = None,
    ) -> None:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{url!r} is no URL of a service; http://HOST:PORT is wanted")
        self.urls = deque(url.rstrip("/") for url in urls)
        """The one that is asked comes first."""
        self.request_timeout_s = request_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self.connections = BlockingConnections(client_context(), authorization(token), KEEP_ALIVE_S)
        """Kept open between requests; to be closed by who made this."""
        self._is_over = threading.Event()

    @property
    def url(self) -> str:
        """URL of the service that is asked first."""
        return self.urls[0]

    def end(self) -> None:
        """Ask no more than once from now on."""
        self._is_over.set()

    def call(
        self, method: str, path: str, body: BaseModel | None = None, deadline: float | None = None
    ) -> HttpResponse:
        """The answer to one request, asked for again until the service was out of reach for too long.

        Args:
            deadline: of a monotonic clock; none begins after it.
        Raises:
            BackendError: no gateway answered.
            ServiceError: whatever the service raised.
        """
        retrying = Retrying(
            retry=retry_if_exception(_is_retryable),
            wait=wait_random_exponential(multiplier=0.1, max=2.0),
            stop=_Outage(self._connect_timeout_s, deadline, self.url)
            | stop_when_event_set(self._is_over),
            sleep=sleep_using_event(self._is_over),
            reraise=True,
        )
        try:
            return retrying(self._call_once, method, path, body, deadline)
        except OSError as error:
            seen = f"({type(error).__name__}: {error})"
            if deadline is not None and time.monotonic() >= deadline:
                raise BackendError(f"{self.url}{path} did not answer in time {seen}") from error
            raise BackendError(
                f"{self.url}{path} did not answer for {self._connect_timeout_s:g} s "
                f"{seen}; is the service running?"
            ) from error

    def _call_once(
        self, method: str, path: str, body: BaseModel | None, deadline: float | None
    ) -> HttpResponse:
        content = None if body is None else to_json(body)
        try:
            answer = self.connections.ask(
                method, self.url + path, content, self._timeouts(deadline)
            )
        except OSError:
            self.urls.rotate(-1)
            raise
        if answer.status >= 400:
            raise error_of(answer.status, answer.content, f"{self.url}{path}")
        return answer

    def _timeouts(self, deadline: float | None) -> Timeouts:
        """Return the time limits of one attempt; the last one before a deadline is not waited for
        beyond it."""
        left = self.request_timeout_s
        if deadline is not None:
            left = min(left, max(SHORTEST_S, deadline - time.monotonic()))
        return Timeouts(connect_s=min(left, CONNECT_S), silent_s=left)


class _Outage(stop_base):
    """Ends retries after `timeout_s`, or once a deadline has passed, and says in the log that it waits;
    one that broke off a long request starts over."""

    def __init__(
        self, timeout_s: float, deadline: float | None = None, url: str = "the service"
    ) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._deadline = deadline
        self._attempt_began = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._notice = WaitNotice(self._url)

    def __call__(self, retry_state: RetryCallState) -> bool:
        now = time.monotonic()
        if now - self._attempt_began > WORKED_ON_S:
            self._begin()
        # The next attempt begins after a pause, which is short beside WORKED_ON_S.
        self._attempt_began = now
        is_late = self._deadline is not None and now >= self._deadline
        is_over = is_late or now - self._since > self._timeout_s
        if not is_over:
            self._notice.log_if_due(str(retry_state.outcome and retry_state.outcome.exception()))
        return is_over


def _is_retryable(error: BaseException) -> bool:
    return isinstance(error, OSError) or (isinstance(error, ServiceError) and error.retryable)
