"""1.0 if the answer taken from the completion equals the row's answer, else 0.0."""

from __future__ import annotations

import re

from headway.contracts.errors import ConfigError, DataError
from headway.rollout.rewards.base import Answer


class ExactMatch:
    """String equality after stripping white space.

    Args:
        answer_key: field of the data row that holds the answer.
        pattern: regular expression whose last match is the answer (its first group if it has one);
            None takes the whole completion.
    """

    def __init__(self, answer_key: str = "answer", pattern: str | None = None) -> None:
        self._answer_key = answer_key
        try:
            self._pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{pattern!r} is not a regular expression: {error}") from error

    def __call__(self, answer: Answer) -> float:
        if self._answer_key not in answer.data:
            raise DataError(
                f"the row has no field {self._answer_key!r}; it has {sorted(answer.data)}"
            )
        return float(self._extract(answer.completion) == str(answer.data[self._answer_key]).strip())

    def _extract(self, completion: str) -> str | None:
        if self._pattern is None:
            return completion.strip()
        matches = list(self._pattern.finditer(completion))
        if not matches:
            return None
        last = matches[-1]
        return (last.group(1) if self._pattern.groups else last.group(0)).strip()
