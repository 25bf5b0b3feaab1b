"""The workflow of `orchestration.py`: four generations, one after the other, and one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from gateway.rewards.base import Answer
from gateway.trajectories.sample import Sample
from gateway.trajectories.transcript import Transcript
from gateway.workflows.base import RolloutContext, register_workflow
from headway.contracts.config.base import Config
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import LLMRequest, Trajectory
from headway.text.tokenizer import TextTokenizer

GENERATIONS = 4
BRIDGE = (1, 2)


class FourGenerations:
    """Four turns with two tokens between them."""

    version: ClassVar[str] = "1"
    Args: ClassVar[type[BaseModel]] = Config

    def __init__(self, tokenizer: TextTokenizer, gconfig: SamplingConfig, args: Any) -> None:
        self._tokenizer = tokenizer
        self._gconfig = gconfig

    async def run(self, sample: Sample, context: RolloutContext) -> Sequence[Trajectory]:
        transcript = Transcript()
        transcript.observe(self._tokenizer.encode_prompt(sample.prompt))
        for turn in range(GENERATIONS):
            if turn:
                transcript.observe(BRIDGE)
            response = await context.generate(
                LLMRequest(
                    rid=f"{sample.rollout_id}.{sample.index}.{turn}",
                    input_ids=transcript.ids,
                    gconfig=self._gconfig,
                    metadata={"group_id": sample.prompt.group_id},
                )
            )
            transcript.sample(response)
        completion = self._tokenizer.decode(response.output_tokens)
        result = await context.score(Answer("", completion, sample.prompt.data))
        return (transcript.trajectory(sample, result),)


register_workflow("four_generations", FourGenerations)
