"""Answers that are scored outside of any rollout."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from headway.contracts.config.base import ComponentConfig, Config, JsonObject
from headway.contracts.errors import ErrorBody
from headway.contracts.types import TokenId, Verdict

MAX_ANSWERS = 256
"""Maximum number of answers in one request."""
MAX_CHARS = 4 << 20
MAX_TOKENS = 1 << 20


class AnswerToScore(Config):
    """A prompt and its completion, each as tokens or as text. Tokens are decoded as a rollout's are; of
    text, a reward that looks at tokens sees none."""

    prompt: str | None = Field(default=None, max_length=MAX_CHARS)
    """Text of the prompt; without text and tokens it is empty."""
    prompt_ids: tuple[TokenId, ...] | None = Field(default=None, max_length=MAX_TOKENS)
    """Tokens of the prompt, in place of the text."""
    completion: str | None = Field(default=None, max_length=MAX_CHARS)
    """The completion that is scored, as text."""
    completion_ids: tuple[TokenId, ...] | None = Field(default=None, max_length=MAX_TOKENS)
    """The completion that is scored, as tokens."""
    data: JsonObject = {}
    """The rest of the data row, as in a prompt."""

    @model_validator(mode="after")
    def _check(self) -> AnswerToScore:
        if self.prompt is not None and self.prompt_ids is not None:
            raise ValueError("the prompt is given as text and as tokens; give one of them")
        if (self.completion is None) == (self.completion_ids is None):
            seen = "neither" if self.completion is None else "both"
            raise ValueError(f"{seen} of completion and completion_ids are given; give one of them")
        return self


class ScoreRequest(Config):
    """`POST /v1/rewards/score`."""

    reward: ComponentConfig
    answers: tuple[AnswerToScore, ...] = Field(min_length=1, max_length=MAX_ANSWERS)


class ScoreView(Config):
    """See `types.RewardResult`."""

    score: float
    verdict: Verdict
    details: dict[str, Any]


class ScoreFailure(Config):
    """Why an answer has no score: its verifier raised or hung, or its row is wrong."""

    error: ErrorBody


class ScoreResponse(Config):
    results: list[ScoreView | ScoreFailure]
    """Scores in the order of the answers."""
