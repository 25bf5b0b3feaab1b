"""Several tries at one prompt: after a wrong answer the policy is told so, and answers again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from headway.contracts.config.base import Config
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import Message, RewardResult, StopReason, Trajectory
from headway.rollout.tokenizer import TextTokenizer
from headway.rollout.workflows.base import Sample, Stage
from headway.rollout.workflows.conversation import Conversation
from headway.rollout.workflows.game import Game


class MultiTurnArgs(Config):
    max_turns: int = Field(2, ge=1, le=256)
    """Answers per sample, at most."""
    feedback: str = Field(
        "Your answer is wrong. Find the mistake, then answer again.",
        min_length=1,
        max_length=65_536,
    )
    """What is said to a wrong answer. A prompt of plain text goes on with it as it is."""
    role: str = Field("user", min_length=1, max_length=64)
    """Who says it."""
    discount: float = Field(1.0, gt=0.0, le=1.0)
    """Multiplies a positive reward once per further turn; a negative one is left, for it would shrink."""
    accept_score: float = Field(1.0, allow_inf_nan=False)
    """A score that ends the rollout, from rewards whose verdict says no more than the number."""
    max_tokens: int | None = Field(None, ge=1)
    """Of the whole row, prompt included; None leaves the bound to the server's context."""
    template_args: dict[str, Any] = {}
    """Further variables of the chat template (`enable_thinking`, ...)."""


class MultiTurn:
    """Answer, be told if it is wrong, answer again; every turn is scored."""

    version: ClassVar[str] = "1"
    Args: ClassVar[type[BaseModel]] = MultiTurnArgs

    def __init__(
        self, tokenizer: TextTokenizer, gconfig: SamplingConfig, args: MultiTurnArgs
    ) -> None:
        self._tokenizer = tokenizer
        self._gconfig = gconfig
        self._args = args
        self._feedback = Message(role=args.role, content=args.feedback)

    async def run(self, sample: Sample, stage: Stage) -> Sequence[Trajectory]:
        args = self._args
        chat = Conversation(self._tokenizer, sample.prompt, template_args=args.template_args)
        game = Game(self._tokenizer, self._gconfig, sample, stage, chat.opening(), args.max_tokens)
        shown: list[int] = []
        results: list[RewardResult] = []
        stop_reason: StopReason | None = None
        while len(results) < args.max_turns and not (results and self._is_accepted(results[-1])):
            if results:
                shown = chat.follow(game.transcript.ids_of(-1), [self._feedback])
            if await game.play(shown) is None:
                stop_reason = "length"
                break
            results.append(await game.score())
            self._note(game, results)
        row = game.transcript.trajectory(sample, self._total(results), stop_reason=stop_reason)
        return (row,)

    def _is_accepted(self, result: RewardResult) -> bool:
        if result.verdict == "scored":
            return result.score >= self._args.accept_score
        return result.verdict == "accepted"

    def _note(self, game: Game, results: Sequence[RewardResult]) -> None:
        """Tell what the last turn earned, and what was said to the one before."""
        game.transcript.annotate(-1, reward=results[-1].score, verdict=results[-1].verdict)
        if len(results) > 1:
            game.transcript.annotate(-2, feedback=self._args.feedback)

    def _total(self, results: Sequence[RewardResult]) -> RewardResult:
        """The last answer's score, discounted by the turns that it took."""
        last = results[-1]
        factor = self._args.discount ** (len(results) - 1) if last.score > 0 else 1.0
        details = {**last.details, "turns": len(results), "score": last.score}
        return replace(last, score=last.score * factor, details=details)
