"""The request of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag

from headway.contracts.types import TokenId
from headway.dialects.error_shapes import InvalidField
from headway.dialects.openai.fields import GenerationFields
from headway.dialects.unsupported import unsupported

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
MAX_PROMPTS = 2048


def _as_prompts(given: Any) -> Any:
    """One prompt, as text or as token ids, is a list of one."""
    is_one = isinstance(given, str) or (
        isinstance(given, list) and bool(given) and isinstance(given[0], int)
    )
    return [given] if is_one else given


CompletionPrompt = Annotated[
    Annotated[str, Field(min_length=1), Tag("text")]
    | Annotated[tuple[TokenId, ...], Tag("token_ids")],
    Discriminator(lambda given: "text" if isinstance(given, str) else "token_ids"),
]


class CompletionRequest(GenerationFields):
    prompt: Annotated[
        tuple[CompletionPrompt, ...],
        BeforeValidator(_as_prompts),
        Field(max_length=MAX_PROMPTS),
    ]
    """Text, token ids, or a list of either."""
    max_tokens: int | None = Field(None, ge=0)
    """None takes 16; 0 with `echo` only scores the prompt."""
    echo: bool | None = None
    """Put the prompt in front of the text, and its logprobs in front of the others."""
    logprobs: int | None = Field(None, ge=0, le=64)
    """Report logprobs of sampled tokens, and of this many most likely ones at each position."""
    best_of: int | None = None
    """Must equal `n`: choices are not ranked."""
    add_special_tokens: Annotated[
        JsonValue, unsupported("a text gets the tokenizer's; send token ids instead", True)
    ] = None
    suffix: Annotated[JsonValue, unsupported("a causal model cannot write towards a suffix")] = None

    def check(self) -> None:
        super().check()
        if not self.prompt:
            raise InvalidField("prompt is an empty list; send at least one", "prompt")
        if self.best_of is not None and self.best_of != self.num_choices:
            raise InvalidField(
                f"best_of={self.best_of} with n={self.num_choices}: choices are not ranked; "
                "leave it out",
                "best_of",
            )
        if self.echo and self.stream and self.logprobs is not None:
            raise InvalidField(
                "a stream cannot begin with the prompt's logprobs, which are known at its end; "
                "leave out echo, logprobs or stream",
                "echo",
            )
