r"""Grade-school math: the number after `####`, in `\boxed{}`, or the last one in the text."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import Field

from gateway.rewards.base import Answer
from gateway.rewards.final_answer import (
    MAX_ANSWER_CHARS,
    MAX_SHOWN_CHARS,
    last_box,
    plain,
)
from headway.contracts.errors import DataError
from headway.contracts.types import RewardResult, Verdict

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)


class GSM8K:
    """1.0 if the completion's number equals the one after `####` in the row's answer."""

    def __init__(
        self,
        answer_key: Annotated[
            str, Field(description="Field of the row that holds the reference solution.")
        ] = "answer",
        strict: Annotated[
            bool,
            Field(
                description="Accept only `#### number` or `\\boxed{number}`, not the last number "
                "of the text."
            ),
        ] = False,
    ) -> None:
        self._answer_key = answer_key
        self._strict = strict

    def __call__(self, answer: Answer) -> RewardResult:
        reference = _MARKED.search(str(answer.data.get(self._answer_key, "")))
        if reference is None:
            raise DataError(f"field {self._answer_key!r} of the row has no '#### number'")
        found = self._find(answer.completion[-MAX_ANSWER_CHARS:])
        if found is None:
            return RewardResult(0.0, verdict="wrong_format")
        is_right = _value(found) == _value(reference.group(1))
        verdict: Verdict = "accepted" if is_right else "wrong_answer"
        return RewardResult(float(is_right), {"found": found[:MAX_SHOWN_CHARS]}, verdict)

    quick = __call__

    def _find(self, completion: str) -> str | None:
        marked: list[str] = _MARKED.findall(completion)
        if marked:
            return marked[-1]
        box = last_box(completion)
        searched = "" if self._strict and box is None else completion if box is None else plain(box)
        numbers: list[str] = _ANY.findall(searched)
        return numbers[-1] if numbers else None


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("$", ""))
