"""The ledger on Redis: several gateways share it, each transition is one Lua script.

Clocks are the server's. What survives its crash is what its append-only file holds: everything under
`appendfsync always`; under `everysec` a power cut may lose the last second, notes too, a kill nothing.
"""

from __future__ import annotations

from gateway.ledger.on_redis.address import parse_address
from gateway.ledger.on_redis.calls import Calls
from gateway.ledger.on_redis.delivery_queue import RedisDeliveryQueue
from gateway.ledger.on_redis.key_value_store import RedisKeyValueStore
from gateway.ledger.on_redis.reader import RedisLedgerReader
from gateway.ledger.on_redis.rollout_queue import RedisRolloutQueue
from gateway.ledger.on_redis.work_queue import RedisWorkQueue
from gateway.ledger.owner import place_of


class RedisLedger(
    RedisRolloutQueue, RedisWorkQueue, RedisDeliveryQueue, RedisLedgerReader, RedisKeyValueStore
):
    """`Ledger` on Redis; see `on_redis.keys` for what is stored."""

    def __init__(self, url: str) -> None:
        super().__init__(Calls(parse_address(url)))

    async def connect(self) -> None:
        await self._calls.start()

    async def open(self, owner: str, lease_s: float) -> None:
        self._owner, self._lease_s = owner, lease_s
        await self.connect()
        try:
            await self._calls.change("inherit", place_of(owner), owner)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._calls.stop()
