"""Several attempts at one prompt: after a wrong answer the policy is told so, and answers again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from gateway.trajectories.sample import Sample
from gateway.workflows.base import RolloutContext
from gateway.workflows.conversation import Conversation
from gateway.workflows.turn_sampler import TurnSampler
from headway.contracts.config.base import Config
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import Message, Prompt, RewardResult, StopReason, Trajectory
from headway.runtime.offload import offload
from headway.text.tokenizer import TextTokenizer


class MultiTurnArgs(Config):
    max_turns: int = Field(2, ge=1, le=256)
    """Answers per sample, at most."""
    feedback: str = Field(
        "Your answer is wrong. Find the mistake, then answer again.",
        min_length=1,
        max_length=65_536,
    )
    """Message that follows a wrong answer. A prompt of plain text goes on with it as it is."""
    role: str = Field("user", min_length=1, max_length=64)
    """Role of that message."""
    discount: float = Field(1.0, gt=0.0, le=1.0)
    """Multiplies a positive reward once per further turn; a negative one is left, for it would shrink."""
    accept_score: float = Field(1.0, allow_inf_nan=False)
    """A score that ends the rollout, from rewards whose verdict says no more than the number."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of the whole row, prompt included; None leaves the bound to the server's
    context."""
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

    def opening(self, prompt: Prompt) -> list[int]:
        """See `base.HasOpening`."""
        return self._chat(prompt).opening()

    async def run(self, sample: Sample, context: RolloutContext) -> Sequence[Trajectory]:
        args = self._args
        chat = self._chat(sample.prompt)
        opening = await offload(chat.size, chat.opening)
        sampler = TurnSampler(
            self._tokenizer, self._gconfig, sample, context, opening, args.max_tokens
        )
        shown: list[int] = []
        results: list[RewardResult] = []
        stop_reason: StopReason | None = None
        while len(results) < args.max_turns and not (results and self._is_accepted(results[-1])):
            if results:
                sampled = sampler.transcript.ids_of(-1)
                shown = await offload(chat.size, chat.follow, sampled, [self._feedback])
            if await sampler.next_turn(shown) is None:
                stop_reason = "length"
                break
            results.append(await sampler.score())
            self._note(sampler, results)
        row = sampler.transcript.trajectory(sample, self._total(results), stop_reason=stop_reason)
        return (row,)

    def _chat(self, prompt: Prompt) -> Conversation:
        return Conversation(self._tokenizer, prompt, template_args=self._args.template_args)

    def _is_accepted(self, result: RewardResult) -> bool:
        if result.verdict == "scored":
            return result.score >= self._args.accept_score
        return result.verdict == "accepted"

    def _note(self, sampler: TurnSampler, results: Sequence[RewardResult]) -> None:
        """Tell what the last turn earned, and what was said to the one before."""
        sampler.transcript.annotate(-1, reward=results[-1].score, verdict=results[-1].verdict)
        if len(results) > 1:
            sampler.transcript.annotate(-2, feedback=self._args.feedback)

    def _total(self, results: Sequence[RewardResult]) -> RewardResult:
        """The last answer's score, discounted by the turns that it took."""
        last = results[-1]
        factor = self._args.discount ** (len(results) - 1) if last.score > 0 else 1.0
        details = {**last.details, "turns": len(results), "score": last.score}
        return replace(last, score=last.score * factor, details=details)
