"""`POST /v1/chat/completions`: what is asked for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, JsonValue

from headway.dialects.error_shapes import InvalidField
from headway.dialects.openai.engine_fields import ChatEngineFields
from headway.dialects.openai.fields import GenerationFields
from headway.dialects.openai.messages import ChatMessage, ChatTool
from headway.dialects.structured_output import ResponseFormat
from headway.dialects.unsupported import ToolChoice, unsupported

OF_TEMPLATE = ("messages", "tools", "add_generation_prompt")
"""Variables of a template that come from the request itself."""


class ChatRequest(GenerationFields, ChatEngineFields):
    messages: tuple[ChatMessage, ...]
    max_completion_tokens: int | None = Field(None, ge=1)
    """Maximum number of new tokens; None takes what the context has left."""
    max_tokens: int | None = Field(None, ge=1)
    """The older name of `max_completion_tokens`."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=64)
    tools: tuple[ChatTool, ...] | None = None
    tool_choice: ToolChoice = None
    """`none` hides the tools from the model, and reads no calls in its output."""
    parallel_tool_calls: bool | None = None
    """False keeps the first call of an answer; `token_ids` keep them all."""
    metadata: dict[str, str] | None = Field(None, max_length=16)
    """Carried along for logs and routing."""
    safety_identifier: str | None = None
    """Carried along for logs and routing."""
    prompt_cache_key: str | None = None
    """Carried along for logs and routing: prefixes are shared without it."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Extension: further variables of the chat template (`enable_thinking`, ...)."""
    response_format: ResponseFormat | None = None
    """Text, any JSON object, or JSON of a schema."""

    store: Annotated[JsonValue, unsupported("nothing is stored", False)] = None
    modalities: Annotated[JsonValue, unsupported("only text", ["text"])] = None
    service_tier: Annotated[JsonValue, unsupported("there is one tier", "auto", "default")] = None
    audio: Annotated[JsonValue, unsupported("this server writes text only")] = None
    prediction: Annotated[JsonValue, unsupported("predicted output is not used")] = None
    reasoning_effort: Annotated[
        JsonValue, unsupported("templates differ here; use chat_template_kwargs")
    ] = None
    verbosity: Annotated[JsonValue, unsupported("say so in the messages")] = None
    web_search_options: Annotated[JsonValue, unsupported("this server searches nothing")] = None
    moderation: Annotated[JsonValue, unsupported("this server moderates nothing")] = None
    prompt_cache_retention: Annotated[JsonValue, unsupported("caches have no schedule")] = None
    prompt_cache_options: Annotated[JsonValue, unsupported("caches have no options")] = None
    functions: Annotated[JsonValue, unsupported("send tools instead")] = None
    function_call: Annotated[JsonValue, unsupported("send tool_choice instead")] = None

    @property
    def offered_tools(self) -> tuple[ChatTool, ...]:
        """Tools that the model may call."""
        return () if self.tool_choice == "none" else self.tools or ()

    def given(self, index: int = 0) -> dict[str, Any]:
        form = self.response_format and self.response_format.bound
        mine = super().given(index)
        return mine if form is None else mine | {"json_schema": form}

    @property
    def max_new_tokens(self) -> int | None:
        """The bound under either name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def notes(self) -> dict[str, str]:
        """Fields that are carried along for logs and routing."""
        named = {
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
        }
        return (self.metadata or {}) | {k: v for k, v in named.items() if v is not None}

    def template_args(self) -> dict[str, Any]:
        """Further variables of the template.

        Raises:
            InvalidField: one of them comes from the request itself.
        """
        given = dict(self.chat_template_kwargs or {})
        if taken := [name for name in OF_TEMPLATE if name in given]:
            raise InvalidField(
                f"chat_template_kwargs sets {taken}, which come from the request itself",
                "chat_template_kwargs",
            )
        return given

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise InvalidField("messages is empty; send at least one", "messages")
        mine = super().given()
        is_bound = mine["json_schema"] is not None or mine["regex"] is not None
        if is_bound and self.response_format is not None and self.response_format.bound is not None:
            raise InvalidField(
                "response_format beside json_schema, regex or structured_outputs; send one of them",
                "response_format",
            )
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidField(
                f"max_tokens={self.max_tokens} and "
                f"max_completion_tokens={self.max_completion_tokens} differ; send one",
                "max_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidField("top_logprobs without logprobs=true; send both", "top_logprobs")
        if self.tool_choice == "auto" and not self.tools:
            raise InvalidField("tool_choice without tools; send both", "tool_choice")
