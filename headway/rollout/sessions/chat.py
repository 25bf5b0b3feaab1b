"""What a client asks of a session, and what it is played with; the words of an API are left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import LLMResponse
from headway.rollout.faces.error_shapes import InvalidField
from headway.rollout.tokenizer import TextTokenizer
from headway.rollout.tool_calls import ToolCall
from headway.rollout.workflows.base import Generate

Message = dict[str, Any]
"""As a chat template sees it: role, content, tool_calls (arguments as an object), tool_call_id."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Tokenizer, bounds and sampler of one session."""

    tokenizer: TextTokenizer
    gconfig: SamplingConfig
    """`max_new_tokens` bounds every request; the rest holds where a request is silent."""
    generate: Generate

    def sampling(
        self, given: Mapping[str, Any], names: Mapping[str, str] | None = None
    ) -> SamplingConfig:
        """The session's parameters with those that a request gave.

        Args:
            given: by our names; None stands for what was not given.
            names: our name -> the request's, where they differ.
        Raises:
            InvalidField: a value is out of bounds.
        """
        mine = self.gconfig.model_dump() | {"seed": None}  # `Session` counts it up per turn
        asked = {name: value for name, value in given.items() if value is not None}
        most = self.gconfig.max_new_tokens
        asked["max_new_tokens"] = min(asked.get("max_new_tokens", most), most)
        try:
            return SamplingConfig.model_validate({**mine, **asked})
        except ValidationError as error:
            raise InvalidField.of(error, names) from error


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client."""

    messages: Sequence[Message]
    gconfig: SamplingConfig
    tools: Sequence[Mapping[str, Any]] = ()
    """What the model may call, as its template sees it; without any, no calls are read."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    top_logprobs: int = 0
    max_calls: int | None = None
    """Tool calls that the client is told of, at most."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of it."""

    number: int
    """Of the turn, from 0."""
    prompt_ids: tuple[int, ...]
    response: LLMResponse
    text: str
    calls: tuple[ToolCall, ...]
    message: Message
    """The answer as the client will send it back, and as a template sees it."""
