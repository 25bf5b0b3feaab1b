"""JSON from outside; what is large is parsed on a thread that lets others run.

A parser in C holds the interpreter's lock until it is through, and so stops the event loop, on whatever
thread it runs. The standard library's parser in Python does not; it takes thirty times as long. Of large
bodies one is parsed at a time. As strict as `from_json`: no `NaN`, no infinite numbers, no half surrogate
pairs.

Not covered: one text of tens of MB, which is copied in one go.
"""

from __future__ import annotations

import asyncio
import json
import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from json.decoder import scanstring  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, NoReturn

from pydantic_core import from_json

from headway.runtime.offload import short_turns

LARGE_BYTES = 512 << 10
"""Below this, a body is parsed within 50 ms whatever it holds."""
MAX_VALUES = 4 << 20
"""Commas of a body, at most: each value costs some 100 bytes of memory."""
SLICE_BYTES = 1 << 20
FEW_MEMBERS = 256
MAX_MEMBERS = 1 << 14
"""Maximum members of all objects with more than `FEW_MEMBERS` together."""


async def parse_json(body: bytes) -> Any:
    """Parse a body of any size.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or holds too much.
    """
    if len(body) > LARGE_BYTES:
        return await parse_large(body)
    tree = from_json(body, allow_inf_nan=False)
    if body.count(b":") > MAX_MEMBERS:  # fewer are no more members
        check_objects(tree)
    return tree


async def parse_large(body: bytes) -> Any:
    """Parse a large body.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or holds too much.
    """
    return await asyncio.get_running_loop().run_in_executor(_executor(), _parse, body)


@cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "large-json")


@cache
def _decoder() -> json.JSONDecoder:
    decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
    decoder.parse_string = _whole_text  # type: ignore[attr-defined]
    decoder.scan_once = py_make_scanner(decoder)  # type: ignore[attr-defined]
    return decoder


def _parse(body: bytes) -> Any:
    slices = range(0, len(body), SLICE_BYTES)
    if sum(body.count(b",", start, start + SLICE_BYTES) for start in slices) > MAX_VALUES:
        raise ValueError(f"the body holds more than {MAX_VALUES} values; send fewer per request")
    with short_turns:
        try:
            tree = _decoder().decode(body.decode())
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        check_objects(tree)
    return tree


def check_objects(tree: Any) -> None:
    """Refuse objects of more members than anybody names.

    Raises:
        ValueError: there are more than `MAX_MEMBERS`.
    """
    left, num_members = [tree], 0
    while left:
        node = left.pop()
        if isinstance(node, dict):
            num_members += len(node) if len(node) > FEW_MEMBERS else 0
            if num_members > MAX_MEMBERS:
                raise ValueError(f"objects of the body hold more than {MAX_MEMBERS} members")
            left.extend(node.values())
        elif isinstance(node, list):
            left.extend(node)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number is out of range")
    return number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _whole_text(text: str, begin: int, strict: bool) -> tuple[str, int]:
    found, end = scanstring(text, begin, strict)
    if not found.isascii():
        found.encode()  # refuses half a surrogate pair
    return found, end
