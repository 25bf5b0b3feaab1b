"""`POST /v1/messages`: what is asked for, and what a chat template sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from headway.contracts.config.base import Config
from headway.dialects.error_shapes import InvalidField
from headway.dialects.structured_output import TextFormat
from headway.dialects.unsupported import UNCONSTRAINED, RequestPart, unsupported

SAMPLING_NAMES = {"max_new_tokens": "max_tokens", "stop": "stop_sequences"}
"""Our name of a sampling parameter -> theirs, where they differ."""


class CacheControl(RequestPart):
    """Prefixes are shared without it."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class TextBlock(RequestPart):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[JsonValue, unsupported("nothing is cited", [])] = None


class ToolUseBlock(RequestPart):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, JsonValue]
    cache_control: CacheControl | None = None
    caller: Annotated[JsonValue, unsupported("models call directly", {"type": "direct"})] = None

    def rendered(self) -> dict[str, Any]:
        """Return the block as the template sees it."""
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


def _kind(given: Any) -> str:
    return "text" if isinstance(given, str) else "blocks"


Text = Annotated[
    Annotated[str, Tag("text")] | Annotated[tuple[TextBlock, ...], Tag("blocks")],
    Discriminator(_kind),
]
"""Text, or blocks of text that are read without anything between them."""


class ToolResultBlock(RequestPart):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: Text = ""
    is_error: bool = False
    """Templates have no word for it: the content must say what went wrong."""
    cache_control: CacheControl | None = None

    def rendered(self) -> dict[str, Any]:
        """Return the block as the template sees it."""
        return {"role": "tool", "content": joined(self.content), "tool_call_id": self.tool_use_id}


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[tuple[Block, ...], Tag("blocks")],
    Discriminator(_kind),
]


class ChatMessage(RequestPart):
    role: Literal["user", "assistant"]
    content: Content

    def rendered(self) -> list[dict[str, Any]]:
        """Return the messages as the template sees them: results of tools are messages of their
        own.

        Raises:
            InvalidField: a block that this role does not write.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        return _assistant(self.content) if self.role == "assistant" else _user(self.content)


class AnthropicTool(RequestPart):
    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, JsonValue]
    """JSON schema."""
    cache_control: CacheControl | None = None
    strict: Annotated[JsonValue, unsupported(f"{UNCONSTRAINED}; leave strict out", False)] = None

    def rendered(self) -> dict[str, Any]:
        """Return the tool as the template sees it: in the form that templates of open models
        know."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(RequestPart):
    type: Annotated[
        Literal["auto", "none"],
        unsupported(f"a call cannot be forced: {UNCONSTRAINED}; send auto or none", "auto", "none"),
    ]
    """`none` hides the tools from the model, and reads no calls in its output."""
    disable_parallel_tool_use: bool = False
    """True keeps the first call of an answer."""


class Metadata(RequestPart):
    user_id: str | None = None
    """Not used."""


class OutputConfig(RequestPart):
    format: TextFormat | None = None
    """Text, or JSON of a schema."""
    effort: Annotated[JsonValue, unsupported("there is one effort")] = None


class MessagesRequest(Config):
    """Null and absent mean the same."""

    model: str
    """Any name: a session has one model."""
    messages: tuple[ChatMessage, ...] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    """Above the session's bound, the bound holds."""
    system: Text | None = None
    stop_sequences: tuple[str, ...] | None = None
    """They are removed from the text."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=0)
    """0 keeps all tokens."""
    stream: bool | None = None
    tools: tuple[AnthropicTool, ...] | None = None
    tool_choice: ToolChoice | None = None
    metadata: Metadata | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None

    thinking: Annotated[
        JsonValue, unsupported("thinking is not distinguished from text", {"type": "disabled"})
    ] = None
    service_tier: Annotated[
        JsonValue, unsupported("there is one tier", "auto", "standard_only")
    ] = None
    speed: Annotated[JsonValue, unsupported("there is one speed", "standard")] = None
    container: Annotated[JsonValue, unsupported("there are no containers")] = None
    context_management: Annotated[JsonValue, unsupported("contexts are not edited")] = None
    mcp_servers: Annotated[JsonValue, unsupported("no servers are called", [])] = None

    def rendered(self) -> list[dict[str, Any]]:
        """The messages that the template sees.

        Raises:
            InvalidField: the last one is the assistant's, or a block is out of place.
        """
        if self.messages[-1].role == "assistant":
            raise InvalidField(
                "the last message is the assistant's, and answers cannot be continued; end with a user "
                "message",
                "messages",
            )
        system = [] if self.system is None else [{"role": "system", "content": joined(self.system)}]
        return [*system, *(one for message in self.messages for one in message.rendered())]

    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the model may call, as the template sees them."""
        is_hidden = self.tool_choice is not None and self.tool_choice.type == "none"
        return [] if is_hidden else [tool.rendered() for tool in self.tools or ()]

    def given(self) -> dict[str, Any]:
        """Sampling parameters by our names; None where the request is silent."""
        form = self.output_config and self.output_config.format
        return {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or None,
            "stop": self.stop_sequences,
            "json_schema": form and form.bound,
        }


def joined(text: str | Sequence[TextBlock]) -> str:
    """The text of its blocks."""
    return text if isinstance(text, str) else "".join(block.text for block in text)


def _assistant(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    calls = [block.rendered() for block in blocks if isinstance(block, ToolUseBlock)]
    if len(texts) + len(calls) < len(blocks):
        raise InvalidField("an assistant message holds a tool_result; users send them", "messages")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return [message | ({"tool_calls": calls} if calls else {})]


def _user(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Results of tools in their places; the text between them is one message."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolUseBlock):
            raise InvalidField("a user message holds a tool_use; assistants send them", "messages")
        if isinstance(block, ToolResultBlock):
            messages.append(block.rendered())
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += block.text
        else:
            messages.append({"role": "user", "content": block.text})
    return messages
