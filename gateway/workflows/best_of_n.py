"""Several answers to one prompt; the best becomes the trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import BaseModel, Field

from gateway.trajectories.sample import Sample
from gateway.workflows.base import RolloutContext, prompt_size
from gateway.workflows.turn_sampler import TurnSampler
from headway.contracts.config.base import Config
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import LLMResponse, Prompt, RewardResult, Trajectory
from headway.runtime.offload import offload
from headway.text.tokenizer import TextTokenizer


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

    def opening(self, prompt: Prompt) -> list[int]:
        """See `base.HasOpening`."""
        return self._tokenizer.encode_prompt(prompt)

    async def run(self, sample: Sample, context: RolloutContext) -> Sequence[Trajectory]:
        opening = await offload(prompt_size(sample.prompt), self.opening, sample.prompt)
        sampler = TurnSampler(self._tokenizer, self._gconfig, sample, context, opening)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_candidate(sampler)) for _ in range(self._n)]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        candidates = [task.result() for task in tasks]
        scores = [result.score for _, result in candidates]
        chosen = scores.index(max(scores))
        response, result = candidates[chosen]
        sampler.transcript.sample(response)
        details = {**result.details, "scores": scores, "chosen": chosen}
        return (sampler.transcript.trajectory(sample, replace(result, details=details)),)


async def _candidate(sampler: TurnSampler) -> tuple[LLMResponse, RewardResult]:
    response = await sampler.candidate()
    return response, await sampler.score_completion(response.output_tokens)
