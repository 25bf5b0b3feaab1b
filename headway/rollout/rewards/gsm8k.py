"""Grade-school math: the number after `####`, in `\\boxed{}`, or the last one in the text."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from headway.contracts.errors import DataError
from headway.rollout.rewards.base import Answer

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_BOXED = re.compile(rf"\\boxed\{{\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)
MAX_COMPLETION_CHARS = 50_000


class GSM8K:
    """1.0 if the completion's number equals the one after `####` in the row's answer.

    Args:
        answer_key: field of the data row that holds the reference solution.
        strict: accept only `#### number` or `\\boxed{number}`, not the last number of the text.
    """

    def __init__(self, answer_key: str = "answer", strict: bool = False) -> None:
        self._answer_key = answer_key
        self._strict = strict

    def __call__(self, answer: Answer) -> float:
        reference = _MARKED.search(str(answer.data.get(self._answer_key, "")))
        if reference is None:
            raise DataError(f"field {self._answer_key!r} of the row has no '#### number'")
        found = self._find(answer.completion[-MAX_COMPLETION_CHARS:])
        return float(found is not None and _value(found) == _value(reference.group(1)))

    def _find(self, completion: str) -> str | None:
        for pattern in (_MARKED, _BOXED):
            marked: list[str] = pattern.findall(completion)
            if marked:
                return marked[-1]
        numbers = [] if self._strict else _ANY.findall(completion)
        return numbers[-1] if numbers else None


def _value(number: str) -> Decimal | None:
    try:
        return Decimal(number.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None
