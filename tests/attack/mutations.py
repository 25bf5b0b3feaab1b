"""Bodies with a value in them that nobody expects."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

EVIL: tuple[Any, ...] = (
    None,
    -1,
    2**31,
    2**63,
    10**400,
    1e308,
    True,
    "",
    "\0",
    "../../../../etc/passwd",
    "http://169.254.169.254/latest/meta-data",
    "gloo://127.0.0.1:1/x",
    "{{ ''.__class__.__mro__ }}",
    "(" * 2_000,
    "a" * 300_000,
    "\U0001f600" * 60_000,
    [],
    {},
    [0] * 100_000,
    [[[[[[]]]]]] * 1_000,
    {"a" * 1_000: {"b": {"c": {}}}},
    {str(number): number for number in range(20_000)},
)

Place = tuple[str | int, ...]


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    """Of all values within a body, the body included."""
    yield here
    if isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*here, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from places(part, (*here, index))


def replaced(body: Any, place: Place, value: Any) -> Any:
    """A copy of the body with another value there."""
    if not place:
        return value
    whole = copy.deepcopy(body)
    part = whole
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    return whole
