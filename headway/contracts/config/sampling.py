"""Sampling of tokens: the `gconfig` of a request."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue, StringConstraints, model_validator
from pydantic_core import to_json

from headway.contracts.config.base import Config

MAX_SCHEMA_BYTES = 1 << 16


class SamplingConfig(Config):
    """Sampling parameters of one sequence.

    Reported logprobs are those of the temperature-scaled distribution, after penalties and
    `logit_bias`, before `top_k`, `top_p` and `min_p` cut it (the convention of SGLang's server); with
    `LLMRequest.sampling_mask`, after. `json_schema` and `regex` count like a bias: what they forbid has
    no probability.
    Greedy sampling reports the distribution of temperature 1.
    """

    max_new_tokens: int = Field(default=256, ge=0, le=1_000_000)
    """Most tokens to sample; 0 only scores the prompt."""
    min_new_tokens: int = Field(default=0, ge=0, le=1_000_000)
    """Stop tokens cannot be sampled before this many tokens."""
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int | None = Field(default=None, ge=1, lt=2**31)
    """Keep this many most likely tokens; None keeps all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Keep tokens with at least this share of the highest probability."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = Field(
        default=(), max_length=64
    )
    """Token ids that end a sequence, besides the model's own end of sequence."""
    stop: tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...] = Field(
        default=(), max_length=16
    )
    """Strings that end a sequence; the tokens that spell one stay in the output."""
    ignore_eos: bool = False
    """Go on past the model's end of sequence."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Taken off the logit of every token that was sampled before."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Taken off the logit of a token once for each time that it was sampled."""
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL,
    arXiv:1909.05858)."""
    logit_bias: dict[
        Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(ge=-100.0, le=100.0)]
    ] = Field(default={}, max_length=1024)
    """Added to the logits of these token ids; 100 forces and -100 forbids."""
    json_schema: dict[str, JsonValue] | None = None
    """The output is JSON of this schema."""
    regex: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None
    """The whole output matches this regular expression."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Seed of this request: same seed, same version, same tokens. None draws one."""

    @property
    def has_grammar(self) -> bool:
        """True if `json_schema` or `regex` bind the output."""
        return self.json_schema is not None or self.regex is not None

    @property
    def cuts_distribution(self) -> bool:
        """True if some tokens cannot be drawn, because of `top_k`, `top_p`, `min_p` or a grammar."""
        is_cut = self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0
        return (is_cut or self.has_grammar) and self.temperature > 0.0

    @model_validator(mode="after")
    def _check(self) -> SamplingConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}"
            )
        if self.has_grammar:
            self._check_grammar()
        return self

    def _check_grammar(self) -> None:
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("json_schema and regex both bind the output; send one of them")
        if self.ignore_eos or self.min_new_tokens:
            raise ValueError(
                "an output with json_schema or regex ends where these say; leave out ignore_eos and "
                "min_new_tokens"
            )
        size = len(to_json(self.json_schema))
        if size > MAX_SCHEMA_BYTES:
            raise ValueError(f"json_schema has {size} bytes, at most {MAX_SCHEMA_BYTES} are read")
