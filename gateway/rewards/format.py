"""The form of an answer, `<think>...</think><answer>...</answer>`, and with it what the answer says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from gateway.components.shared_services import SharedServices
from gateway.rewards.base import (
    Answer,
    AsyncReward,
    Reward,
    RewardFunction,
    as_result,
    make_reward,
)
from headway.contracts.config.base import ComponentConfig
from headway.contracts.errors import ConfigError
from headway.contracts.types import RewardResult, Verdict

Tag = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^<>\s]+$")]
Weight = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Shape:
    """Tags in their order, each once; the last one holds the answer."""

    tags: tuple[str, ...]
    weight: float
    inner_weight: float

    def answer_of(self, answer: Answer) -> Answer | None:
        """The same with the content of the last tag as completion; None if the form is not kept.

        A prompt that ends in the first opening tag, as templates of reasoning models do, has opened it.
        """
        text = answer.completion.strip()
        opening = f"<{self.tags[0]}>"
        if answer.prompt.rstrip().endswith(opening) and not text.startswith(opening):
            text = opening + text
        position, content = 0, ""
        for tag in self.tags:
            start, end = f"<{tag}>", f"</{tag}>"
            if text.count(start) != 1 or text.count(end) != 1:
                return None
            opened, closed = text.find(start, position), text.find(end, position)
            if opened < 0 or closed < opened or text[position:opened].strip():
                return None
            content = text[opened + len(start) : closed]
            position = closed + len(end)
        return None if text[position:].strip() else replace(answer, completion=content.strip())

    def combine(self, inner: RewardResult) -> RewardResult:
        """The form is kept, and the answer earned this."""
        score = self.weight + self.inner_weight * inner.score
        details = {**inner.details, "format": self.weight, "answer": inner.score}
        return RewardResult(score, details, inner.verdict)


_WRONG = RewardResult(0.0, verdict="wrong_format")


class Format:
    """The form alone, or with a reward that needs no others."""

    def __init__(self, shape: Shape, inner: RewardFunction | None) -> None:
        self._shape = shape
        self._inner = inner
        self._inner_quick = getattr(inner, "quick", None)
        self.hang_verdict: Verdict | None = getattr(inner, "hang_verdict", None)
        self.check = getattr(inner, "check", None)
        self.preload: tuple[str, ...] = getattr(inner, "preload", ())

    def quick(self, answer: Answer) -> RewardResult | None:
        """Settles the form, and the answer where its own reward settles it."""
        content = self._shape.answer_of(answer)
        if content is None:
            return _WRONG
        if self._inner is None:
            return RewardResult(self._shape.weight, verdict="accepted")
        settled = None if self._inner_quick is None else self._inner_quick(content)
        return None if settled is None else self._shape.combine(as_result("inner", settled))

    def __call__(self, answer: Answer) -> RewardResult:
        content = self._shape.answer_of(answer)
        if content is None or self._inner is None:
            return (
                _WRONG if content is None else RewardResult(self._shape.weight, verdict="accepted")
            )
        return self._shape.combine(as_result("inner", self._inner(content)))


class AsyncFormat:
    """`AsyncReward`: the form, with a reward that awaits others."""

    def __init__(self, shape: Shape, inner: AsyncReward) -> None:
        self._shape = shape
        self._inner = inner

    async def score(self, answer: Answer, services: SharedServices) -> RewardResult:
        content = self._shape.answer_of(answer)
        if content is None:
            return _WRONG
        return self._shape.combine(as_result("inner", await self._inner.score(content, services)))


def make_format(
    tags: Annotated[
        tuple[Tag, ...],
        Field(min_length=1, max_length=8, description="In this order, each once."),
    ] = ("think", "answer"),
    weight: Annotated[Weight, Field(description="Score of the form alone.")] = 1.0,
    inner: Annotated[
        ComponentConfig | None,
        Field(description="Reward of the last tag's content; null asks only for the form."),
    ] = None,
    inner_weight: Annotated[Weight, Field(description="Factor of its score.")] = 1.0,
) -> Reward:
    """`weight` for the tags in their order, plus what another reward gives the content of the last.

    An answer that does not keep the form gets 0 and is not scored further.
    """
    if len(set(tags)) != len(tags):
        raise ConfigError(f"tags={list(tags)} names one twice; each stands for one part")
    shape = Shape(tuple(tags), weight, inner_weight)
    if inner is None:
        return Format(shape, None)
    if inner.name == "format":
        raise ConfigError("a format inside a format: name all tags in one")
    made: Any = make_reward(inner.name, inner.args)
    return AsyncFormat(shape, made) if isinstance(made, AsyncReward) else Format(shape, made)
