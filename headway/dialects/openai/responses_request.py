"""`POST /v1/responses`: what is asked for, and what a chat template sees of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from headway.contracts.config.base import Config
from headway.dialects.error_shapes import InvalidField
from headway.dialects.structured_output import TextFormat
from headway.dialects.unsupported import UNCONSTRAINED, RequestPart, ToolChoice, unsupported

SAMPLING_NAMES = {"max_new_tokens": "max_output_tokens"}
"""Our name of a sampling parameter -> theirs, where they differ."""
Status = Literal["in_progress", "completed", "incomplete"]


class ResponseTextPart(RequestPart):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[JsonValue, unsupported("templates know no annotations", [])] = None
    logprobs: JsonValue = None
    """Logprobs that an answer carried; nothing is read from them."""


def _form(given: Any) -> str:
    return "text" if isinstance(given, str) else "parts"


Text = Annotated[
    Annotated[str, Tag("text")] | Annotated[tuple[ResponseTextPart, ...], Tag("parts")],
    Discriminator(_form),
]
"""Text, or parts of text that are read without anything between them."""


class MessageItem(RequestPart):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    """`developer` is rendered as `system`: templates of open models know no other name for it."""
    content: Text
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCallItem(RequestPart):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: str
    """A JSON object, as text."""
    id: str | None = None
    status: Status | None = None

    def rendered(self) -> dict[str, Any]:
        """Return the call as the template sees it: arguments as an object, since templates write
        the JSON."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidField(
                f"arguments of function call {self.call_id!r} are no JSON object: "
                f"{self.arguments[:80]!r}",
                "input",
            )
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class FunctionOutputItem(RequestPart):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: Text
    id: str | None = None
    status: Status | None = None


def _kind(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return str(kind or "message")


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class FunctionTool(RequestPart):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    """JSON schema."""
    strict: Annotated[JsonValue, unsupported(f"{UNCONSTRAINED}; send strict: false", False)] = None

    def rendered(self) -> dict[str, Any]:
        """Return the tool as the template sees it: in the form that templates of open models
        know."""
        given = {"name": self.name, "description": self.description, "parameters": self.parameters}
        function = {name: value for name, value in given.items() if value is not None}
        return {"type": "function", "function": function}


class TextSettings(RequestPart):
    format: TextFormat | None = None
    """Text, any JSON object, or JSON of a schema."""
    verbosity: Annotated[JsonValue, unsupported("say so in the messages")] = None


class ResponsesRequest(Config):
    """Null and absent mean the same."""

    model: str | None = None
    """Any name: a session has one model."""
    input: Annotated[
        Annotated[str, Tag("text")] | Annotated[tuple[Item, ...], Tag("parts")],
        Discriminator(_form),
    ]
    instructions: str | None = None
    """A system message in front of everything; as OpenAI has it, none is carried over from an earlier
    answer."""
    previous_response_id: str | None = None
    """An answer of this session: `input` goes on from it."""
    max_output_tokens: int | None = Field(None, ge=1)
    """Above the session's bound, the bound holds."""
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    """False: no later request can go on from this answer by its id."""
    tools: tuple[FunctionTool, ...] | None = None
    tool_choice: ToolChoice = None
    """`none` hides the tools from the model, and reads no calls in its output."""
    parallel_tool_calls: bool | None = None
    """False keeps the first call of an answer."""
    metadata: dict[str, str] | None = Field(None, max_length=16)
    """Comes back with the answer."""
    user: str | None = None
    """Not used."""
    safety_identifier: str | None = None
    """Not used."""
    prompt_cache_key: str | None = None
    """Not used: prefixes are shared without it."""
    text: TextSettings | None = None

    include: Annotated[
        JsonValue,
        unsupported("nothing can be included; leave it out", [], ["reasoning.encrypted_content"]),
    ] = None
    truncation: Annotated[JsonValue, unsupported("nothing is truncated", "disabled")] = None
    reasoning: Annotated[JsonValue, unsupported("reasoning is not distinguished from text", {})] = (
        None
    )
    service_tier: Annotated[JsonValue, unsupported("there is one tier", "auto", "default")] = None
    stream_options: Annotated[
        JsonValue, unsupported("streams have no options", {}, {"include_obfuscation": False})
    ] = None
    top_logprobs: Annotated[JsonValue, unsupported("send chat completions for logprobs", 0)] = None
    background: Annotated[JsonValue, unsupported("answers are made while you wait", False)] = None
    conversation: Annotated[JsonValue, unsupported("send previous_response_id instead")] = None
    max_tool_calls: Annotated[JsonValue, unsupported("the client makes all calls")] = None
    prompt: Annotated[JsonValue, unsupported("no prompts are stored")] = None

    def new_messages(self) -> list[dict[str, Any]]:
        """The messages of `input` that the template sees.

        Raises:
            InvalidField: a call whose arguments are no JSON object, or nothing at all.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not self.input:
            raise InvalidField("input is empty; send at least one item", "input")
        return _messages(self.input)

    def instruction(self) -> list[dict[str, Any]]:
        """`instructions` as a message, if there are any."""
        given = self.instructions
        return [] if given is None else [{"role": "system", "content": given}]

    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the model may call, as the template sees them."""
        return [] if self.tool_choice == "none" else [tool.rendered() for tool in self.tools or ()]

    def given(self) -> dict[str, Any]:
        """Sampling parameters by our names; None where the request is silent."""
        form = self.text and self.text.format
        return {
            "max_new_tokens": self.max_output_tokens,
            "json_schema": form and form.bound,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """An assistant's text and the calls that follow it are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        said: dict[str, Any]
        if isinstance(item, FunctionOutputItem):
            said = {"role": "tool", "content": _joined(item.output), "tool_call_id": item.call_id}
        elif isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            said = {"role": role, "content": _joined(item.content)}
        elif messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(item.rendered())
            continue
        else:
            said = {"role": "assistant", "content": "", "tool_calls": [item.rendered()]}
        messages.append(said)
    return messages


def _joined(text: str | Sequence[ResponseTextPart]) -> str:
    return text if isinstance(text, str) else "".join(part.text for part in text)
