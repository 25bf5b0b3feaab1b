"""The messages and tools of a chat, and what a chat template sees of them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag
from pydantic_core import PydanticCustomError

from headway.contracts.config.base import Config
from headway.dialects.error_shapes import InvalidField
from headway.dialects.unsupported import RequestPart, unsupported


class ChatTextPart(RequestPart):
    type: Literal["text"]
    text: str


def _only_text(content: Any) -> Any:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in (None, "text"):
            raise PydanticCustomError(
                "not_text", "this server reads text parts only, not {kind}", {"kind": kind}
            )
    return content


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[tuple[ChatTextPart, ...], Tag("parts")],
    Discriminator(lambda given: "text" if isinstance(given, str) else "parts"),
    BeforeValidator(_only_text),
]
"""Text, or parts of text that are read without anything between them."""


class InstructionMessage(RequestPart):
    role: Literal["system", "developer"]
    """`developer` is rendered as `system`: templates of open models know no other name for it."""
    content: Content
    name: str | None = None

    def rendered(self) -> dict[str, Any]:
        """Return the part as the template sees it."""
        return _with_name("system", self.content, self.name)


class UserMessage(RequestPart):
    role: Literal["user"]
    content: Content
    name: str | None = None

    def rendered(self) -> dict[str, Any]:
        """Return the part as the template sees it."""
        return _with_name("user", self.content, self.name)


class CalledFunction(RequestPart):
    name: str = Field(min_length=1)
    arguments: str
    """A JSON object, as text."""


class MessageToolCall(RequestPart):
    id: str
    type: Literal["function"]
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """Return the call as the template sees it: arguments as an object, since templates write
        the JSON."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidField(
                f"arguments of tool call {self.id!r} are no JSON object: "
                f"{self.function.arguments[:80]!r}",
                "messages",
            )
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class AssistantMessage(RequestPart):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: tuple[MessageToolCall, ...] | None = None
    reasoning_content: str | None = None
    """Extension: the template decides whether it is shown."""
    refusal: Annotated[JsonValue, unsupported("templates know no refusals; send content")] = None
    audio: Annotated[JsonValue, unsupported("this server reads text only")] = None
    annotations: Annotated[JsonValue, unsupported("templates know no annotations", [])] = None
    function_call: Annotated[JsonValue, unsupported("send tool_calls instead")] = None

    def rendered(self) -> dict[str, Any]:
        """Return the message as the template sees it."""
        if self.content is None and not self.tool_calls:
            raise InvalidField(
                "an assistant message has neither content nor tool_calls", "messages"
            )
        message = _with_name("assistant", self.content, self.name)
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.rendered() for call in self.tool_calls]
        return message


class ToolMessage(RequestPart):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None

    def rendered(self) -> dict[str, Any]:
        """Return the message as the template sees it."""
        message = _with_name("tool", self.content, self.name)
        return {**message, "tool_call_id": self.tool_call_id}


ChatMessage = Annotated[
    InstructionMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


class FunctionDefinition(Config):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    """JSON schema."""
    strict: Annotated[
        JsonValue, unsupported("output is not constrained to a schema; leave strict out", False)
    ] = None


class ChatTool(Config):
    type: Literal["function"]
    function: FunctionDefinition

    def rendered(self) -> dict[str, Any]:
        """Return the message as the template sees it: as it was sent."""
        return self.model_dump(exclude_unset=True, exclude={"function": {"strict"}})


def _with_name(role: str, content: Content | None, name: str | None) -> dict[str, Any]:
    text = content if isinstance(content, str) or content is None else _joined(content)
    return {"role": role, "content": text} | ({} if name is None else {"name": name})


def _joined(parts: tuple[ChatTextPart, ...]) -> str:
    return "".join(part.text for part in parts)
