"""Connections to Redis that fail as redis-py says, whichever event loop they are on."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

TIMEOUT_S = 2.0
"""Of a connection attempt and of each answer."""


def redis_client(url: str, decode_responses: bool = False) -> Redis:
    """Return a client without retries of its own: its users have deadlines.

    Raises:
        ValueError, TypeError: the URL is malformed, or asks for what redis-py does not know.
    """
    client: Redis = Redis.from_url(
        url,
        decode_responses=decode_responses,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    pool = client.connection_pool
    pool.connection_class = type("Connection", (_ResetIsAnOutage, pool.connection_class), {})
    pool.make_connection()  # type: ignore[no-untyped-call]  # refuses unknown options of the URL
    return client


class _ResetIsAnOutage(AbstractConnection):
    """uvloop raises `RuntimeError` where a connection was reset before its socket was used."""

    async def connect(self) -> None:
        try:
            await super().connect()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise RedisConnectionError(str(error)) from error

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        try:
            await super().send_packed_command(command, check_health)
        except RuntimeError as error:
            raise RedisConnectionError(str(error)) from error
