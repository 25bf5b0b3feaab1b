"""One prompt, one answer, one verdict (reinforcement learning with verifiable rewards)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import BaseModel

from headway.contracts.config.base import Config
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import LLMRequest, Trajectory
from headway.rollout.rewards.base import Answer
from headway.rollout.tokenizer import TextTokenizer
from headway.rollout.workflows.base import Sample, Stage


class SingleTurnArgs(Config):
    """Takes no arguments."""


class SingleTurn:
    """`Workflow`: generate once, score the text."""

    version: ClassVar[str] = "1"
    Args: ClassVar[type[BaseModel]] = SingleTurnArgs

    def __init__(
        self, tokenizer: TextTokenizer, gconfig: SamplingConfig, args: SingleTurnArgs
    ) -> None:
        self._tokenizer = tokenizer
        self._gconfig = gconfig

    async def run(self, sample: Sample, stage: Stage) -> Sequence[Trajectory]:
        prompt_ids = self._tokenizer.encode_prompt(sample.prompt)
        gconfig = self._gconfig
        if gconfig.seed is not None:  # siblings of a seeded group must differ
            gconfig = gconfig.model_copy(update={"seed": gconfig.seed + sample.index})
        response = await stage.generate(
            LLMRequest(
                rid=f"{sample.rollout_id}.{sample.index}",
                input_ids=tuple(prompt_ids),
                gconfig=gconfig,
                metadata={"group_id": sample.prompt.group_id},
            )
        )
        output = response.output_tokens
        result = await stage.score(
            Answer(
                prompt=self._tokenizer.decode(prompt_ids),
                completion=self._tokenizer.decode(output),
                data=sample.prompt.data,
                prompt_ids=prompt_ids,
                completion_ids=output,
            )
        )
        padding = [0] * len(prompt_ids)
        trajectory = Trajectory(
            rollout_id=sample.rollout_id,
            group_id=sample.prompt.group_id,
            sample_index=sample.index,
            input_ids=np.array(prompt_ids + output, dtype=np.int32),
            loss_mask=np.array([False] * len(prompt_ids) + [True] * len(output)),
            logprobs=np.array(padding + response.output_logprobs, dtype=np.float32),
            versions=np.array([-1] * len(prompt_ids) + response.output_versions, dtype=np.int32),
            reward=result.score,
            stop_reason=response.stop_reason,
            verdict=result.verdict,
            details=result.details,
        )
        return (trajectory,)
