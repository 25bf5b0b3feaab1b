"""Large bodies are read as small ones are; `tests/attack` sees that the loop goes round meanwhile."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic_core import from_json

from headway.runtime import large_json
from headway.runtime.large_json import FEW_MEMBERS, MAX_MEMBERS, check_objects, parse_large

TREES: list[Any] = [
    {"a": [1, -2, 3.5, 1e-7, True, None, "x"], "b": {"c": {}, "d": []}},
    ["é", "😀", '"', "\\", "\n", "\u0000", ""],
    {"": 0, "a b": "\u2028"},
    12345678901234567890123,
    "text",
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
@pytest.mark.parametrize("is_ascii", [True, False])
async def test_it_reads_what_the_other_parser_reads(tree: Any, is_ascii: bool):
    body = json.dumps(tree, ensure_ascii=is_ascii).encode()
    assert await parse_large(b" " + body + b"\n") == from_json(body) == tree


REFUSED = [
    b"",
    b"[1,]",
    b"[1 2]",
    b"{'a': 1}",
    b'{"a": 1',
    b"[1] [2]",
    b"NaN",
    b"[Infinity]",
    b"[-Infinity]",
    b'["\\ud800"]',
    b'["\\udc00\\ud800"]',
    b'["\n"]',
    b'["\\x"]',
    b"[" * 100_000,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe",
    b"[" + b"9" * 5000 + b"]",
]


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: repr(body[:24]))
async def test_it_refuses_what_the_other_parser_refuses(body: bytes):
    with pytest.raises(ValueError):
        from_json(body, allow_inf_nan=False)
    with pytest.raises(ValueError):
        await parse_large(body)


async def test_a_number_out_of_range_is_refused():
    with pytest.raises(ValueError, match="out of range"):
        await parse_large(b"[1e400]")


async def test_values_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(large_json, "MAX_VALUES", 10)
    assert await parse_large(b"[" + b"1," * 10 + b"1]") == [1] * 11
    with pytest.raises(ValueError, match="more than 10 values"):
        await parse_large(b"[" + b"1," * 11 + b"1]")


def test_members_are_bounded_where_there_are_many():
    few = {str(number): number for number in range(FEW_MEMBERS)}
    check_objects([few] * 1000)
    many = {str(number): number for number in range(MAX_MEMBERS // 2)}
    check_objects([many, many])
    with pytest.raises(ValueError, match=f"more than {MAX_MEMBERS} members"):
        check_objects({"a": many, "b": [many, {"c": many}]})
