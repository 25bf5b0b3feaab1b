"""Tool calls in a model's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The form of the Hermes and Qwen chat templates. A block that holds no call stays text, as it was
written; white space around a call is no text, unless text stands on both sides. A call is given out
when its block ends.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any, NoReturn

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model asks for."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)

    def rendered(self) -> dict[str, Any]:
        """Return the call as a chat template sees it: arguments as an object, since templates write
        the JSON."""
        function = {"name": self.name, "arguments": json.loads(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class ToolCallStream:
    """Splits a text that grows into text and calls."""

    def __init__(self) -> None:
        self._held = ""
        self._gap: str | None = None
        """Behind a call: the white space before it, which parts text before from text behind."""

    def feed(self, text: str) -> list[str | ToolCall]:
        """Return the parts that are certain now, in order."""
        self._held += text
        pieces: list[str | ToolCall] = []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0:
                break
            pieces += self._take_block(start, end, end + len(CLOSE))
        if start < 0:
            start = _start_of_tag(self._held)
        return [*pieces, *self._take_text(len(self._held[:start].rstrip()))]

    def finish(self) -> list[str | ToolCall]:
        """The rest; a block that was never closed is a call if it holds a whole one."""
        start = self._held.find(OPEN)
        end = len(self._held)
        return self._take_text(end) if start < 0 else self._take_block(start, end, end)

    def _take_block(self, start: int, end: int, after: int) -> list[str | ToolCall]:
        call = parse_call(self._held[start + len(OPEN) : end])
        if call is None:
            return self._take_text(after)
        length = len(self._held[:start].rstrip())
        gap, rest = self._held[length:start], self._held[after:]
        before = self._take_text(length)
        self._held = rest
        self._gap = gap if self._gap is None else self._gap
        return [*before, call]

    def _take_text(self, length: int) -> list[str | ToolCall]:
        text, self._held = self._held[:length], self._held[length:]
        if self._gap is not None:
            if not (text := text.lstrip()):
                return []
            text, self._gap = self._gap + text, None
        return [text] if text else []


def parse_call(body: str) -> ToolCall | None:
    """The call that a block holds; None if it holds none."""
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
        name, arguments = call["name"], call.get("arguments", {})
        if isinstance(arguments, str):  # some models write the object as text
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        (name + text).encode()  # half a surrogate pair cannot travel
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return ToolCall(name, text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _start_of_tag(text: str) -> int:
    """Return the offset at which the text may begin to spell a tag; its length if it does not."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:length]):
            return len(text) - length
    return len(text)
