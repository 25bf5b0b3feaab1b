"""A ledger by its name in the config."""

from __future__ import annotations

from gateway.ledger.base import Ledger
from gateway.ledger.sqlite import SqliteLedger
from headway.contracts.errors import ConfigError

REDIS_SCHEMES = ("redis", "rediss", "unix")


def make_ledger(name: str) -> Ledger:
    """A ledger, not open yet.

    Args:
        name: path of an SQLite file, `:memory:`, or `redis://HOST:PORT/DB?prefix=NAME` (also `rediss://`
            and `unix://`).
    Raises:
        ConfigError: a URL of another kind, or redis-py is not installed.
    """
    scheme, separator, _ = name.partition("://")
    if not separator:
        return SqliteLedger(name)
    if scheme not in REDIS_SCHEMES:
        raise ConfigError(
            f"ledger {name!r} is neither a path nor a {'://, '.join(REDIS_SCHEMES)}:// URL"
        )
    try:
        # Not every gateway has redis-py.
        from gateway.ledger.redis import RedisLedger
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise ConfigError(
            f"ledger {name!r} needs redis-py; install Headway with the extra 'redis'"
        ) from error
    return RedisLedger(name)
