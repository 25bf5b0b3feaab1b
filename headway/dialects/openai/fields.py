"""The fields that completions and chat completions share, and how they become sampling parameters."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, JsonValue, ValidationError

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import TokenId
from headway.dialects.error_shapes import InvalidField
from headway.dialects.openai.engine_fields import EngineFields
from headway.dialects.unsupported import RequestPart, unsupported
from headway.dialects.version_wanted import VersionWanted

MAX_CHOICES = 128
SAMPLING_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Our name of a sampling parameter -> theirs, where they differ."""


class StreamOptions(RequestPart):
    include_usage: bool | None = None
    """Send the usage in a last chunk without choices."""
    include_obfuscation: Annotated[JsonValue, unsupported("streams are not padded", False)] = None
    continuous_usage_stats: Annotated[
        JsonValue, unsupported("the usage is known at the end", False)
    ] = None


class GenerationFields(EngineFields):
    """Null and absent mean the same: OpenAI's default."""

    model: str
    """The served model, by its name or path, or as `default`; another name is answered with 404."""
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """Choices per prompt; choice i samples with `seed + i`."""
    temperature: float | None = None
    top_p: float | None = None
    stop: str | tuple[str, ...] | None = None
    """Strings that end a choice; they are removed from its text and stay in its `token_ids`."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Carried along for logs and routing."""

    top_k: int | None = Field(None, ge=-1)
    """Extension: 0 and -1 keep all tokens."""
    min_p: float | None = None
    """Extension."""
    repetition_penalty: float | None = None
    """Extension."""
    stop_token_ids: tuple[TokenId, ...] | None = None
    """Extension: tokens that end a choice; they are left out of its text."""
    ignore_eos: bool | None = None
    """Extension."""
    min_tokens: int | None = None
    """Extension."""
    weight_version: VersionWanted | None = None
    """Extension: the version that has to serve; 409 with Retry-After while it does not."""
    return_token_ids: bool | None = None
    """Extension: false leaves `token_ids`, `prompt_token_ids` and `version_runs` out."""

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def has_token_ids(self) -> bool:
        """True if choices carry token ids and versions."""
        return self.return_token_ids is not False

    @property
    def has_usage_chunk(self) -> bool:
        """True if a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    def sampling(self, max_new_tokens: int, index: int) -> SamplingConfig:
        """Sampling parameters of one choice.

        Raises:
            InvalidField: a value is out of bounds.
        """
        given = {name: value for name, value in self.given(index).items() if value is not None}
        try:
            return SamplingConfig(**{**given, "max_new_tokens": max_new_tokens})
        except ValidationError as error:
            raise InvalidField.of(error, SAMPLING_NAMES) from error

    def given(self, index: int = 0) -> dict[str, Any]:
        """Parameters of one choice by our names; None where the request is silent."""
        other = self.structured_outputs
        return {
            "json_schema": self.json_schema if other is None else other.json_,
            "regex": self.regex if other is None else other.regex,
            "min_new_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None or self.top_k < 1 else self.top_k,
            "min_p": self.min_p,
            "stop": None if self.stop is None else self.stops,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "seed": None if self.seed is None else self.seed + index,
        }

    def check(self) -> None:
        """Refuse fields that contradict each other.

        Raises:
            InvalidField: they do.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidField(
                "stream_options without stream=true; send both or neither", "stream_options"
            )
        is_bound = self.json_schema is not None or self.regex is not None
        if self.structured_outputs is not None and is_bound:
            raise InvalidField(
                "structured_outputs beside json_schema or regex; send one of them",
                "structured_outputs",
            )
