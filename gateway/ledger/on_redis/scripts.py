"""The Lua scripts: one per transition, so that each is atomic; loaded from `lua/`."""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files

from gateway.ledger.on_redis.keys import lua_table

HANDING = ("deliver", "deliver_exactly")


@cache
def source_of(name: str) -> str:
    """The whole text of a script."""
    parts = ["prelude", *(["handing"] if name in HANDING else []), name]
    folder = files("gateway.ledger.on_redis") / "lua"
    return lua_table() + "".join((folder / f"{part}.lua").read_text("utf-8") for part in parts)


@cache
def digest_of(name: str) -> str:
    """Return the name under which `EVALSHA` knows a script."""
    return sha1(source_of(name).encode(), usedforsecurity=False).hexdigest()
