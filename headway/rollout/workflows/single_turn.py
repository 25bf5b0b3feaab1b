"""One prompt, one answer, one verdict (reinforcement learning with verifiable rewards)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import BaseModel

from headway.contracts.config.base import Config
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import Trajectory
from headway.rollout.tokenizer import TextTokenizer
from headway.rollout.workflows.base import Sample, Stage
from headway.rollout.workflows.game import Game


class SingleTurnArgs(Config):
    """Takes no arguments."""


class SingleTurn:
    """Generate once, score the text."""

    version: ClassVar[str] = "1"
    Args: ClassVar[type[BaseModel]] = SingleTurnArgs

    def __init__(
        self, tokenizer: TextTokenizer, gconfig: SamplingConfig, args: SingleTurnArgs
    ) -> None:
        self._tokenizer = tokenizer
        self._gconfig = gconfig

    async def run(self, sample: Sample, stage: Stage) -> Sequence[Trajectory]:
        opening = self._tokenizer.encode_prompt(sample.prompt)
        game = Game(self._tokenizer, self._gconfig, sample, stage, opening)
        await game.play()
        return (game.transcript.trajectory(sample, await game.score()),)
