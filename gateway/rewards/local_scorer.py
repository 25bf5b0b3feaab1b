"""Rewards in a process that is no gateway: a trainer's worker scores its own responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.components.shared_services import NoOutbound, SharedServices
from gateway.rewards.batch_scorer import BatchScorer
from gateway.rewards.scoring import Scorer
from gateway.sandbox.choice import make_sandbox
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.gateway import ExecutorConfig, SandboxConfig
from headway.contracts.errors import DataError, RewardError
from headway.contracts.http.rewards import AnswerToScore
from headway.text.tokenizer import TextTokenizer


class LocalScorer:
    """Scores by one reward, with verifiers in processes of its own and programs in this machine's
    sandbox; used by one thread.
    """

    def __init__(self, reward: ComponentConfig, tokenizer: str, failed_score: float | None) -> None:
        """
        Args:
            tokenizer: directory of the model whose tokens are scored.
            failed_score: of an answer whose verifier fails; None raises its error.
        Raises:
            UnknownName, ConfigError: the reward cannot be made.
        """
        self._reward = reward
        self._failed_score = failed_score
        config = ExecutorConfig()
        outbound = NoOutbound()
        self._sandbox = make_sandbox(SandboxConfig(), outbound)
        self._scorer = Scorer(config, SharedServices(self._sandbox, outbound))
        self._batches = BatchScorer(self._scorer, TextTokenizer(tokenizer), config)
        self._runner = asyncio.Runner()
        self._runner.run(self._start())

    def score(self, answers: Sequence[AnswerToScore]) -> list[float]:
        """Return the score of each answer.

        Raises:
            RewardError, DataError: of the first answer that has no score, unless failed ones have one.
            RewardOutage: an answer could not be scored; the call may be made again.
        """
        outcomes = self._runner.run(self._batches.score(self._reward, answers))
        return [self._score_of(outcome) for outcome in outcomes]

    def close(self) -> None:
        """End the processes; the last call."""
        self._runner.run(self._end())
        self._runner.close()

    def _score_of(self, outcome: object) -> float:
        if isinstance(outcome, RewardError | DataError):
            if self._failed_score is None:
                raise outcome
            return self._failed_score
        return float(outcome.score)  # type: ignore[attr-defined] # a RewardResult

    async def _start(self) -> None:
        if self._reward.name == "code":
            await self._sandbox.start()
        await self._scorer.pool.start()
        await self._scorer.prepare(self._reward)

    async def _end(self) -> None:
        await self._scorer.aclose()
        await self._sandbox.aclose()
