"""Registration at a gateway: a report at every heartbeat, with a new version, and when draining."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Sequence

import aiohttp
from pydantic import ValidationError

from headway.contracts.errors import BackendError, ServiceError
from headway.contracts.http.adapters import adapter_views
from headway.contracts.http.paths import SERVERS
from headway.contracts.http.servers import ServerReport, ServerReportResponse
from headway.runtime.secret import authorization
from headway.runtime.server_calls import error_of
from headway.runtime.tls import client_context
from inference_server.engine import LocalGenerator

log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Seconds for a gateway to take a report, before another one gets it: well within a server's lease."""
LOOK_S = 0.1
"""Seconds between checks for changes that are reported before the next heartbeat."""


async def keep_registered(
    generator: LocalGenerator,
    gateways: Sequence[str],
    url: str,
    heartbeat_s: float,
    token: str | None = None,
) -> None:
    """Report forever to one of these gateways, and to the next when it does not answer."""
    server_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    timeout = aiohttp.ClientTimeout(total=max(ANSWER_S, heartbeat_s))
    async with aiohttp.ClientSession(
        timeout=timeout,
        headers=authorization(token),
        connector=aiohttp.TCPConnector(ssl=client_context()),
    ) as session:
        reporter = Reporter(session, gateways)
        while True:
            report = generator.report(server_id, url)
            await reporter.report(report)
            await _pause(generator, report, heartbeat_s)


class Reporter:
    """Reports to gateways; remembers which one answers, and the state that it returned."""

    def __init__(self, session: aiohttp.ClientSession, gateways: Sequence[str]) -> None:
        self._session = session
        self._gateways = list(gateways)
        self._is_reachable = True
        self._state = ""

    async def report(self, report: ServerReport) -> None:
        """Send a report to the gateway that answered last, else to the others in turn, once each."""
        for _ in range(len(self._gateways)):
            try:
                self._note(await _report(self._session, self._gateways[0], report))
            except ServiceError as error:
                if self._is_reachable:
                    log.warning(
                        "gateway does not answer",
                        extra={"gateway": self._gateways[0], "reason": str(error)},
                    )
                self._gateways.append(self._gateways.pop(0))
            else:
                self._is_reachable = True
                return
        self._is_reachable = False

    def _note(self, answer: ServerReportResponse) -> None:
        if answer.state != self._state:
            log.info(
                "the gateway changed this server's state",
                extra={
                    "gateway": self._gateways[0],
                    "state": answer.state,
                    "reason": answer.reason,
                },
            )
            self._state = answer.state


async def _pause(generator: LocalGenerator, sent: ServerReport, heartbeat_s: float) -> None:
    """Wait for the next report: at the heartbeat, a new version or adapter, or the start of a drain."""
    deadline = time.monotonic() + heartbeat_s

    def is_current() -> bool:
        is_draining = generator.admission.draining.is_set()
        now = (generator.version, adapter_views(generator.adapter_versions), is_draining)
        return (sent.version, sent.adapters, sent.draining) == now

    while (left_s := deadline - time.monotonic()) > 0 and is_current():  # noqa: ASYNC110 - swaps send no event
        await asyncio.sleep(min(LOOK_S, left_s))


async def _report(
    session: aiohttp.ClientSession, gateway: str, report: ServerReport
) -> ServerReportResponse:
    target = gateway.rstrip("/") + SERVERS
    body = report.model_dump_json().encode()
    try:
        async with session.post(
            target, data=body, headers={"content-type": "application/json"}
        ) as answer:
            content = await answer.read()
            if answer.status >= 400:
                raise error_of(answer.status, content, target)
            return ServerReportResponse.from_response(content)
    except ValidationError as error:
        raise BackendError(f"{target} answered with something else: {error}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BackendError(f"{target}: {type(error).__name__}: {error}") from error
