"""The workflow `second_thought`: the policy answers, is asked to check itself, and answers again.

Named in `modules` of the gateway's config, it registers itself when the gateway starts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import BaseModel, Field

from headway import (
    Config,
    Conversation,
    Message,
    RolloutContext,
    Sample,
    SamplingConfig,
    TextTokenizer,
    Trajectory,
    TurnSampler,
    register_workflow,
)


class SecondThoughtArgs(Config):
    request: str = Field("Check your answer, then write it again.", min_length=1)
    """Reply to the first answer, right or wrong."""
    bonus: float = Field(0.0, ge=0.0)
    """Bonus for a wrong first answer that was corrected."""


class SecondThought:
    """Answer twice; the second answer counts, and correcting the first may earn more."""

    version: ClassVar[str] = "1"
    Args: ClassVar[type[BaseModel]] = SecondThoughtArgs

    def __init__(
        self, tokenizer: TextTokenizer, gconfig: SamplingConfig, args: SecondThoughtArgs
    ) -> None:
        self._tokenizer = tokenizer
        self._gconfig = gconfig
        self._args = args

    async def run(self, sample: Sample, context: RolloutContext) -> Sequence[Trajectory]:
        chat = Conversation(self._tokenizer, sample.prompt)
        sampler = TurnSampler(self._tokenizer, self._gconfig, sample, context, chat.opening())
        await sampler.next_turn()
        first = second = await sampler.score()
        asked = chat.follow(
            sampler.transcript.ids_of(0), [Message(role="user", content=self._args.request)]
        )
        if await sampler.next_turn(asked) is not None:  # None: the context is full
            second = await sampler.score()
        bonus = self._args.bonus if second.score > first.score else 0.0
        details = {**second.details, "first": first.score}
        result = replace(second, score=second.score + bonus, details=details)
        return (sampler.transcript.trajectory(sample, result),)


register_workflow("second_thought", SecondThought)
