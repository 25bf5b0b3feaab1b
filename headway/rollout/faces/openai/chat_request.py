"""`POST /v1/chat/completions`: what is asked for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from headway.rollout.faces.error_shapes import InvalidField
from headway.rollout.faces.openai.fields import GenerationFields
from headway.rollout.faces.openai.messages import ChatMessage, Tool
from headway.rollout.faces.refusal import refused

UNCONSTRAINED = "output is not constrained to a grammar"
OF_TEMPLATE = ("messages", "tools", "add_generation_prompt")
"""Variables of a template that come from the request itself."""


class ChatRequest(GenerationFields):
    messages: tuple[ChatMessage, ...]
    max_completion_tokens: int | None = Field(None, ge=1)
    """None takes what the context has left."""
    max_tokens: int | None = Field(None, ge=1)
    """The older name of `max_completion_tokens`."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=64)
    tools: tuple[Tool, ...] | None = None
    tool_choice: Annotated[
        Literal["auto", "none"] | None,
        refused(f"a call cannot be forced: {UNCONSTRAINED}; send auto or none", "auto", "none"),
    ] = None
    """`none` hides the tools from the model, and reads no calls in its output."""
    parallel_tool_calls: bool | None = None
    """False keeps the first call of an answer; `token_ids` keep them all."""
    metadata: dict[str, str] | None = Field(None, max_length=16)
    """For logs and routing."""
    safety_identifier: str | None = None
    """For logs and routing."""
    prompt_cache_key: str | None = None
    """For logs and routing: prefixes are shared without it."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Extension: further variables of the chat template (`enable_thinking`, ...)."""

    store: Annotated[JsonValue, refused("nothing is stored", False)] = None
    response_format: Annotated[
        JsonValue, refused(f"only text: {UNCONSTRAINED}", {"type": "text"})
    ] = None
    modalities: Annotated[JsonValue, refused("only text", ["text"])] = None
    service_tier: Annotated[JsonValue, refused("there is one tier", "auto", "default")] = None
    audio: Annotated[JsonValue, refused("this server writes text only")] = None
    prediction: Annotated[JsonValue, refused("predicted output is not used")] = None
    reasoning_effort: Annotated[
        JsonValue, refused("templates differ here; use chat_template_kwargs")
    ] = None
    verbosity: Annotated[JsonValue, refused("say so in the messages")] = None
    web_search_options: Annotated[JsonValue, refused("this server searches nothing")] = None
    moderation: Annotated[JsonValue, refused("this server moderates nothing")] = None
    prompt_cache_retention: Annotated[JsonValue, refused("caches have no schedule")] = None
    prompt_cache_options: Annotated[JsonValue, refused("caches have no options")] = None
    functions: Annotated[JsonValue, refused("send tools instead")] = None
    function_call: Annotated[JsonValue, refused("send tool_choice instead")] = None

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """Tools that the model may call."""
        return () if self.tool_choice == "none" else self.tools or ()

    @property
    def max_new_tokens(self) -> int | None:
        """The bound under either name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def notes(self) -> dict[str, str]:
        """What is carried along for logs and routing."""
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
