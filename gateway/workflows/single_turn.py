"""One prompt, one answer, one verdict (reinforcement learning with verifiable rewards)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import BaseModel

from gateway.trajectories.sample import Sample
from gateway.workflows.base import RolloutContext, prompt_size
from gateway.workflows.turn_sampler import TurnSampler
from headway.contracts.config.base import Config
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import Prompt, Trajectory
from headway.runtime.offload import offload
from headway.text.tokenizer import TextTokenizer


class SingleTurnArgs(Config):
    """How the samples of a group differ."""

    greedy_first: bool = False
    """The first sample of a group takes the most likely tokens: the baseline of ReMax
    (arXiv:2310.10505)."""


class SingleTurn:
    """Generate once, score the text."""

    version: ClassVar[str] = "1"
    Args: ClassVar[type[BaseModel]] = SingleTurnArgs

    def __init__(
        self, tokenizer: TextTokenizer, gconfig: SamplingConfig, args: SingleTurnArgs
    ) -> None:
        self._tokenizer = tokenizer
        self._gconfig = gconfig
        self._greedy = gconfig.model_copy(update={"temperature": 0.0})
        self._has_greedy = args.greedy_first

    def opening(self, prompt: Prompt) -> list[int]:
        """See `base.HasOpening`."""
        return self._tokenizer.encode_prompt(prompt)

    async def run(self, sample: Sample, context: RolloutContext) -> Sequence[Trajectory]:
        opening = await offload(prompt_size(sample.prompt), self.opening, sample.prompt)
        gconfig = self._greedy if self._has_greedy and sample.index == 0 else self._gconfig
        sampler = TurnSampler(self._tokenizer, gconfig, sample, context, opening)
        await sampler.next_turn()
        return (sampler.transcript.trajectory(sample, await sampler.score()),)
