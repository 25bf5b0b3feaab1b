"""Python values that a program returned, read back outside it. What is read may be hostile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Opaque:
    """Something that only has a meaning inside the program; equal to nothing."""

    text: str
    items: list[Any] | None = field(default=None)
    """Items of an iterator."""


def read_value(result: dict[str, Any]) -> Any:
    """The value behind one of `Outcome.results`, which must hold a `value`.

    Raises:
        ValueError: no program of ours wrote this.
    """
    if "exact" not in result:
        return result["value"]
    try:
        return _decode(result["exact"])
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no value: {error}") from error


def _decode(exact: Any) -> Any:
    if not isinstance(exact, list):
        return exact
    kind, content = exact
    if kind in _SCALARS:
        return _SCALARS[kind](content)
    if kind == "dict":
        return {_decode(key): _decode(value) for key, value in content}
    items = [_decode(item) for item in content]
    if kind == "iterator":
        return Opaque("an iterator", items)
    if kind not in _CONTAINERS:
        raise ValueError(f"no value: unknown kind {kind!r}")
    return _CONTAINERS[kind](items)


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda parts: complex(*parts),
    "bytes": lambda text: text.encode("latin-1"),
    "object": Opaque,
}
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def write_source(value: Any) -> str:
    """A Python expression for a value that `read_value` gave."""
    if isinstance(value, Opaque):
        return "object()" if value.items is None else f"iter({write_source(value.items)})"
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value)
    if isinstance(value, float | complex):
        return f"{type(value).__name__}({str(value)!r})"
    if isinstance(value, dict):
        pairs = (f"{write_source(k)}: {write_source(v)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    for base in (list, tuple, set, frozenset):
        if isinstance(value, base):
            return f"{base.__name__}([{', '.join(map(write_source, value))}])"
    return repr(value)
