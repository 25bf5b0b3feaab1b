"""The registry of several gateways: one hash in Redis.

    <prefix>servers           hash: server id -> JSON {report, gateway, number, at_ms, lease_ms}
    <prefix>servers:held      hash: server id -> "1", also of servers that are away
    <prefix>servers:number    counts the reports

Times are Redis' own, so that gateways need not agree on theirs.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar, cast

from redis.exceptions import RedisError

from gateway.fleet.registry.base import SharedReport
from gateway.ledger.on_redis.connection import redis_client
from headway.contracts.errors import NotFound, StateError
from headway.contracts.http.servers import ServerReport

T = TypeVar("T")

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
_ANNOUNCE = (
    _NOW
    + """
for i = 3, #ARGV, 3 do
  local number = redis.call('INCR', KEYS[3])
  local entry = {report = ARGV[i + 1], gateway = ARGV[1], number = number,
                 at_ms = now - tonumber(ARGV[i + 2]), lease_ms = tonumber(ARGV[2])}
  redis.call('HSET', KEYS[1], ARGV[i], cjson.encode(entry))
end
"""
)
_MEMBERS = (
    _NOW
    + """
local answer, all = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local entry = cjson.decode(all[i + 1])
  if now - entry.at_ms > entry.lease_ms then
    redis.call('HDEL', KEYS[1], all[i])
  else
    entry.age_ms = now - entry.at_ms
    entry.drain_requested = redis.call('HEXISTS', KEYS[2], all[i]) == 1
    table.insert(answer, cjson.encode(entry))
  end
end
return answer
"""
)
_HOLD = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
if ARGV[2] == '1' then redis.call('HSET', KEYS[2], ARGV[1], '1')
else redis.call('HDEL', KEYS[2], ARGV[1]) end
return 1
"""


class RedisRegistry:
    """`Registry` that gateways with the same Redis and prefix share."""

    def __init__(self, url: str, prefix: str = "headway:") -> None:
        self._redis = redis_client(url, decode_responses=True)
        self._keys = [prefix + name for name in ("servers", "servers:held", "servers:number")]
        self._announce = self._redis.register_script(_ANNOUNCE)
        self._members = self._redis.register_script(_MEMBERS)
        self._hold = self._redis.register_script(_HOLD)

    async def open(self) -> None:
        await _answer(cast("Awaitable[Any]", self._redis.ping()))

    async def announce(
        self,
        gateway: str,
        reports: Sequence[ServerReport],
        lease_s: float,
        ages_s: Sequence[float] | None = None,
    ) -> None:
        if not reports:
            return
        arguments: list[str | int] = [gateway, round(lease_s * 1000)]
        for one, age_s in zip(reports, ages_s or [0.0] * len(reports), strict=True):
            arguments += [one.server_id, one.model_dump_json(), round(age_s * 1000)]
        await _answer(self._announce(keys=self._keys, args=arguments))

    async def members(self) -> list[SharedReport]:
        entries = [json.loads(text) for text in await _answer(self._members(keys=self._keys))]
        shared_reports = [
            SharedReport(
                ServerReport.model_validate_json(entry["report"]),
                entry["gateway"],
                entry["number"],
                entry["age_ms"] / 1000,
                entry["drain_requested"],
            )
            for entry in entries
        ]
        return sorted(shared_reports, key=lambda shared: shared.report.server_id)

    async def forget(self, server_id: str) -> None:
        for key in self._keys[:2]:
            await _answer(cast("Awaitable[Any]", self._redis.hdel(key, server_id)))

    async def set_draining(self, server_id: str, drain_requested: bool) -> None:
        arguments: list[str | int] = [server_id, int(drain_requested)]
        if not await _answer(self._hold(keys=self._keys, args=arguments)):
            raise NotFound(f"no server {server_id!r} has reported lately")

    async def close(self) -> None:
        await self._redis.aclose()


async def _answer(call: Awaitable[T]) -> T:
    try:
        return await call
    except (RedisError, OSError) as error:
        raise StateError(f"Redis did not answer: {type(error).__name__}: {error}") from error
