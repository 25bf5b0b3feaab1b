"""`KeyValueStore` on Redis."""

from __future__ import annotations

from gateway.ledger.on_redis.calls import WithCalls


class RedisKeyValueStore(WithCalls):
    """All in one hash."""

    is_shared = True

    async def get_value(self, key: str) -> str | None:
        value = await self._calls.get("notes", key)
        return None if value is None else value.decode()

    async def set_value(self, key: str, value: str) -> None:
        await self._calls.change("set_value", key, value)

    async def compare_and_set(self, key: str, old: str | None, new: str) -> bool:
        is_known = int(old is not None)
        return bool(await self._calls.count("compare_and_set", key, is_known, old or "", new))
