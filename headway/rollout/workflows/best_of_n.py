"""Several answers to one prompt, of which the best becomes the trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import BaseModel, Field

from headway.contracts.config.base import Config
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import LLMResponse, RewardResult, Trajectory
from headway.rollout.tokenizer import TextTokenizer
from headway.rollout.workflows.base import Sample, Stage
from headway.rollout.workflows.game import Game


class BestOfNArgs(Config):
    n: int = Field(4, ge=1, le=256)
    """Answers sampled and scored per trajectory."""


class BestOfN:
    """Sample and score n answers, keep the best; the first of equal ones.

    What is kept is no fair sample of the policy: meant for distillation and evaluation.
    """

    version: ClassVar[str] = "1"
    Args: ClassVar[type[BaseModel]] = BestOfNArgs

    def __init__(
        self, tokenizer: TextTokenizer, gconfig: SamplingConfig, args: BestOfNArgs
    ) -> None:
        self._tokenizer = tokenizer
        self._gconfig = gconfig
        self._n = args.n

    async def run(self, sample: Sample, stage: Stage) -> Sequence[Trajectory]:
        opening = self._tokenizer.encode_prompt(sample.prompt)
        game = Game(self._tokenizer, self._gconfig, sample, stage, opening)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_candidate(game)) for _ in range(self._n)]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        candidates = [task.result() for task in tasks]
        scores = [result.score for _, result in candidates]
        chosen = scores.index(max(scores))
        response, result = candidates[chosen]
        game.transcript.sample(response)
        details = {**result.details, "scores": scores, "chosen": chosen}
        return (game.transcript.trajectory(sample, replace(result, details=details)),)


async def _candidate(game: Game) -> tuple[LLMResponse, RewardResult]:
    response = await game.propose()
    return response, await game.judge(response.output_tokens)
