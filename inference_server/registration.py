"""Tells a gateway that this server is here, every second."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid

import aiohttp

from headway.contracts.errors import BackendError, ServiceError
from headway.contracts.http import SERVERS, ServerReport
from headway.runtime.server_calls import error_of
from inference_server.engine import LocalGenerator

log = logging.getLogger(__name__)


async def keep_registered(
    generator: LocalGenerator, gateway: str, url: str, heartbeat_s: float
) -> None:
    """Report forever; a gateway that is away is tried again at the next beat."""
    server_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    timeout = aiohttp.ClientTimeout(total=max(5.0, heartbeat_s))
    is_reachable = True
    async with aiohttp.ClientSession(timeout=timeout) as session:
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
            await asyncio.sleep(heartbeat_s)


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
