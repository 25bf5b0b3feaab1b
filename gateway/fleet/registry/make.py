"""The registry that belongs to a ledger."""

from __future__ import annotations

from gateway.fleet.registry.base import ServerRegistry
from gateway.fleet.registry.memory import MemoryRegistry


def make_registry(ledger: str) -> ServerRegistry:
    """A registry, not open yet: shared by those who share the ledger.

    Args:
        ledger: its name in the config; see `make_ledger`.
    Raises:
        ConfigError: a Redis URL with a wrong prefix.
    """
    if "://" not in ledger:
        return MemoryRegistry()
    # Not every gateway has redis-py.
    from gateway.fleet.registry.redis import RedisRegistry
    from gateway.ledger.on_redis.address import parse_address

    address = parse_address(ledger)
    return RedisRegistry(address.url, f"{address.prefix}:")
