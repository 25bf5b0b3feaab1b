"""Requests of a client to a session, and the session's replies, independent of the API's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from gateway.trajectories.sample import Generate
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import LLMResponse
from headway.dialects.error_shapes import InvalidField
from headway.runtime.offload import size_of
from headway.text.tokenizer import TextTokenizer
from headway.text.tool_calls import ToolCall

Message = dict[str, Any]
"""Message as a chat template sees it: role, content, tool_calls (arguments as an object),
tool_call_id."""


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
class TurnRequest:
    """One request of a client."""

    messages: Sequence[Message]
    gconfig: SamplingConfig
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the model may call, as its template sees them; without any, no calls are read."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    top_logprobs: int = 0
    max_calls: int | None = None
    """Maximum number of tool calls that the client receives."""

    @property
    def size(self) -> int:
        """Characters that a chat template reads, for `offload`."""
        return size_of([self.messages, self.tools, dict(self.template_args)])


@dataclass(frozen=True, slots=True)
class TurnReply:
    """Reply to a turn's request."""

    number: int
    """Number of the turn, from 0."""
    prompt_ids: tuple[int, ...]
    response: LLMResponse
    text: str
    calls: tuple[ToolCall, ...]
    message: Message
    """The answer as the client will send it back, and as a template sees it."""
