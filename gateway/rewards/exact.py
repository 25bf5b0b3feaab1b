"""1.0 if the answer taken from the completion equals the row's answer, else 0.0."""

from __future__ import annotations

import re
from collections import deque
from functools import cached_property
from typing import Annotated

from pydantic import Field

from gateway.rewards.alarm import TimeIsUp, cpu_limit
from gateway.rewards.base import Answer
from headway.contracts.errors import ConfigError, DataError, RewardError
from headway.contracts.types import RewardResult

PATTERN_CPU_S = 1.0
"""Over one answer."""


class ExactMatch:
    """String equality after stripping white space."""

    def __init__(
        self,
        answer_key: Annotated[
            str, Field(description="Field of the row that holds the answer.")
        ] = "answer",
        pattern: Annotated[
            str | None,
            Field(
                max_length=4096,
                description="Regular expression whose last match is the answer (its first group if "
                "it has one); null takes the whole completion.",
            ),
        ] = None,
    ) -> None:
        self._answer_key = answer_key
        self._source = pattern
        self.check = None if pattern is None else self._check

    def _check(self) -> None:
        """See `base.RewardFunction`: some patterns take seconds to compile.

        Raises:
            ConfigError: the pattern is no regular expression.
        """
        _ = self._pattern

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        try:
            return None if self._source is None else re.compile(self._source)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"{self._source!r} is not a regular expression: {error}") from error

    def quick(self, answer: Answer) -> RewardResult | None:
        # A pattern comes from outside, and some take time exponential in the text.
        return self(answer) if self._source is None else None

    def __call__(self, answer: Answer) -> RewardResult:
        if self._answer_key not in answer.data:
            raise DataError(
                f"the row has no field {self._answer_key!r}; it has {sorted(answer.data)}"
            )
        found = self._find(answer.completion)
        if found is None:
            return RewardResult(0.0, verdict="wrong_format")
        is_right = found == str(answer.data[self._answer_key]).strip()
        return RewardResult(float(is_right), verdict="accepted" if is_right else "wrong_answer")

    def _find(self, completion: str) -> str | None:
        if self._pattern is None:
            return completion.strip()
        try:
            with cpu_limit(PATTERN_CPU_S):
                return self._extract(self._pattern, completion)
        except TimeIsUp as error:
            raise RewardError(
                f"the pattern {self._source!r} took longer than {PATTERN_CPU_S:g} s of CPU over an "
                f"answer of {len(completion)} characters; write one that does not try every way to match"
            ) from error

    def _extract(self, pattern: re.Pattern[str], completion: str) -> str | None:
        matches = deque(pattern.finditer(completion), maxlen=1)
        if not matches:
            return None
        last = matches[0]
        found = last.group(1) if pattern.groups else last.group(0)
        return None if found is None else found.strip()
