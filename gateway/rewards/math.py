r"""Mathematics: equal as text or as numbers, else equal to math-verify (sympy).

The gold answer is a LaTeX expression (MATH-500's `answer`), or a solution that ends in `\boxed{}` or
`#### number`. The first two comparisons take microseconds on the event loop; only what they leave open
reaches sympy, in a process that can be killed, under an alarm of its own.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

from pydantic import Field

from gateway.rewards.alarm import TimeIsUp, cpu_limit
from gateway.rewards.base import Answer
from gateway.rewards.final_answer import (
    MAX_ANSWER_CHARS,
    MAX_SHOWN_CHARS,
    is_same,
    last_box,
    last_formula,
)
from headway.contracts.errors import ConfigError, DataError
from headway.contracts.types import RewardResult, Verdict


class Math:
    """1.0 if the completion's final answer equals the row's, as mathematics, else 0.0."""

    hang_verdict: ClassVar[Verdict | None] = "timeout"
    preload: ClassVar[tuple[str, ...]] = ("gateway.rewards.sympy_warm",)

    def __init__(
        self,
        answer_key: Annotated[
            str, Field(description="Field of the row that holds the answer, or a solution.")
        ] = "answer",
        strict: Annotated[
            bool,
            Field(
                description="Accept only an answer in `\\boxed{}`, not what else looks like the "
                "last expression of the text."
            ),
        ] = False,
        timeout_s: Annotated[
            float,
            Field(
                gt=0.0, le=60.0, description="CPU seconds for one answer, then it is a `timeout`."
            ),
        ] = 2.0,
    ) -> None:
        if find_spec("math_verify") is None:
            raise ConfigError(
                "the reward 'math' needs math-verify, which is not installed here; install Headway "
                "with the extra 'rewards'"
            )
        self._answer_key = answer_key
        self._strict = strict
        self._timeout_s = timeout_s

    def quick(self, answer: Answer) -> RewardResult | None:
        """Return the result where text and numbers decide."""
        gold, tail = self._gold(answer), answer.completion[-MAX_ANSWER_CHARS:]
        box = last_box(tail)
        if box is not None:
            verdict = is_same(box, gold)
            return None if verdict is None else _judged(verdict, box)
        if self._strict or not tail.strip():
            return RewardResult(0.0, verdict="wrong_format")
        shown = last_formula(tail)
        return _judged(True, shown) if shown is not None and is_same(shown, gold) else None

    def __call__(self, answer: Answer) -> RewardResult:
        settled = self.quick(answer)
        if settled is not None:
            return settled
        tail = answer.completion[-MAX_ANSWER_CHARS:]
        box = last_box(tail)
        shown = (tail if box is None else box)[-MAX_SHOWN_CHARS:]
        try:
            with cpu_limit(self._timeout_s):
                return _judged(_is_equal(self._gold(answer), box, tail), shown)
        except TimeIsUp:
            return RewardResult(0.0, {"found": shown}, "timeout")
        except MemoryError:
            return RewardResult(0.0, {"found": shown}, "memory")

    def _gold(self, answer: Answer) -> str:
        if self._answer_key not in answer.data:
            raise DataError(
                f"the row has no field {self._answer_key!r}; it has {sorted(answer.data)}"
            )
        text = str(answer.data[self._answer_key])
        box = last_box(text)
        gold = text.rpartition("####")[2].strip() if box is None else box
        if not gold:
            raise DataError(f"field {self._answer_key!r} of the row holds no answer")
        return gold


def _judged(is_right: bool, found: str) -> RewardResult:
    verdict: Verdict = "accepted" if is_right else "wrong_answer"
    return RewardResult(float(is_right), {"found": found[-MAX_SHOWN_CHARS:]}, verdict)


def _is_equal(gold: str, box: str | None, tail: str) -> bool:
    """True if math-verify accepts the boxed answer, or the last one of the text, as the gold
    one."""
    return _verify(gold, _parse(tail)) if box is None else _is_equal_box(gold, box)


@lru_cache(maxsize=1024)  # siblings make the same mistakes
def _is_equal_box(gold: str, box: str) -> bool:
    return _verify(gold, _parse_box(box))


def _verify(gold: str, found: list[Any]) -> bool:
    from math_verify import verify

    return bool(verify(_parse_box(gold), found, timeout_seconds=None))


@lru_cache(maxsize=256)
def _parse_box(latex: str) -> list[Any]:
    return _parse(f"\\boxed{{{latex}}}")


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    # It warns that nothing limits its time: our alarm does, over parsing and comparing together.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return list(parse(text, parsing_timeout=None))
