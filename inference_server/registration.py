"""Tells a gateway that this server is here, at every heartbeat and as soon as it drains."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from contextlib import suppress

import aiohttp

from headway.contracts.errors import BackendError, ServiceError
from headway.contracts.http import SERVERS, ServerReport
from headway.runtime.secret import authorization
from headway.runtime.server_calls import error_of
from inference_server.engine import LocalGenerator

log = logging.getLogger(__name__)


async def keep_registered(
    generator: LocalGenerator, gateway: str, url: str, heartbeat_s: float, token: str | None = None
) -> None:
    """Report forever; a gateway that is away is tried again at the next beat."""
    server_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    timeout = aiohttp.ClientTimeout(total=max(5.0, heartbeat_s))
    is_reachable = True
    async with aiohttp.ClientSession(timeout=timeout, headers=authorization(token)) as session:
        while True:
            try:
                await _report(session, gateway, generator.report(server_id, url))
                is_reachable = True
            except ServiceError as error:
                if is_reachable:
                    log.warning(
                        "gateway does not answer", extra={"gateway": gateway, "reason": str(error)}
                    )
                is_reachable = False
            await _pause(generator, heartbeat_s)


async def _pause(generator: LocalGenerator, heartbeat_s: float) -> None:
    """Until the next heartbeat; the beginning of a drain is one."""
    if generator.admission.draining.is_set():
        await asyncio.sleep(heartbeat_s)
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(heartbeat_s):
            await generator.admission.draining.wait()


async def _report(session: aiohttp.ClientSession, gateway: str, report: ServerReport) -> None:
    target = gateway.rstrip("/") + SERVERS
    body = report.model_dump_json().encode()
    try:
        async with session.post(
            target, data=body, headers={"content-type": "application/json"}
        ) as answer:
            if answer.status >= 400:
                raise error_of(answer.status, await answer.read(), target)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BackendError(f"{target}: {type(error).__name__}: {error}") from error
