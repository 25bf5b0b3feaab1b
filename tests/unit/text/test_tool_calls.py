"""Calls are cut out of a text that grows; whatever is no call stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.text.tool_calls import ToolCall, ToolCallStream, parse_call


def block(name: str, **arguments) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def split(text: str, size: int = 10_000) -> tuple[str, list[ToolCall]]:
    stream = ToolCallStream()
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    pieces = [piece for part in parts for piece in stream.feed(part)] + stream.finish()
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return content, [piece for piece in pieces if isinstance(piece, ToolCall)]


SUM = ToolCall("add", '{"a": 1, "b": 2}')
CASES = {
    "": ("", []),
    "no call": ("no call", []),
    "blank at the end \n": ("blank at the end \n", []),
    block("add", a=1, b=2): ("", [SUM]),
    "Let me see.\n" + block("add", a=1, b=2) + "\n": ("Let me see.", [SUM]),
    block("add", a=1, b=2) + "\n" + block("add", a=1, b=2): ("", [SUM, SUM]),
    "x " + block("add", a=1, b=2) + "\n\ny": ("x y", [SUM]),
    "x " + block("add", a=1, b=2) + "\n" + block("add", a=1, b=2) + "\ny": ("x y", [SUM, SUM]),
    # The end of the sequence came instead of the closing tag.
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}': ("", [SUM]),
    # Half a call is text.
    'a <tool_call>{"name": "add", "argum': ('a <tool_call>{"name": "add", "argum', []),
    "a <tool_call>nonsense</tool_call> b": ("a <tool_call>nonsense</tool_call> b", []),
    "1 <tool_cal 2": ("1 <tool_cal 2", []),
    "ends in <tool_": ("ends in <tool_", []),
}


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("size", [1, 2, 5, 10_000])
def test_text_and_calls_are_told_apart_however_they_arrive(text, size):
    assert split(text, size) == CASES[text]


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "{", " ", "x", block("f")]), max_size=9
    ),
    st.integers(1, 9),
)
def test_a_stream_says_what_the_whole_says(parts, size):
    text = "".join(parts)
    assert split(text, size) == split(text)


def test_text_before_a_call_does_not_wait_for_it():
    stream = ToolCallStream()
    assert stream.feed("Let me see.\n<tool_call>{") == ["Let me see."]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "null",
        '"text"',
        "{}",
        '{"name": 3}',
        '{"name": ""}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "[1]"}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": "\\ud800"}}',
        '{"name": "f", "arguments": ' + '{"x":' * 100_000,
        '{"name": "f"} trailing',
    ],
    ids=lambda body: body[:30],
)
def test_what_is_no_call_is_none(body):
    assert parse_call(body) is None


def test_arguments_are_kept_as_json_text():
    assert parse_call('{"name": "f"}') == ToolCall("f", "{}")
    assert parse_call('{"name": "f", "arguments": "{\\"a\\": 1}"}') == ToolCall("f", '{"a": 1}')
    call = parse_call('{"name": "f", "arguments": {"city": "Zürich"}}')
    assert call == ToolCall("f", '{"city": "Zürich"}')


def test_every_call_has_an_id_of_its_own():
    _, calls = split(block("f") + block("f"))
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") for call in calls)
