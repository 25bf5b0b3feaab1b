"""`BatchScorer`: many answers scored at a time, outside of any rollout.

At most `executor.max_concurrent_scores` of them are before the verifiers at once, over all calls, so that
answers of rollouts do not wait behind a whole batch. Each answer has a result, or the error that is its
row's or its verifier's fault. What says nothing of the answer (an outage, a sandbox that is not there)
ends the whole call, and the judgements under way with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.rewards.base import Answer
from gateway.rewards.scoring import Scorer
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.errors import ConfigError, DataError, RewardError, ServiceError
from headway.contracts.http import paths
from headway.contracts.http.rewards import AnswerToScore
from headway.contracts.types import RewardResult
from headway.runtime.fair_pool import CALLER
from headway.runtime.offload import SMALL, offload
from headway.text.tokenizer import TextTokenizer

ScoreOutcome = RewardResult | ServiceError


class BatchScorer:
    """Shares a scorer with the rollouts."""

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: TextTokenizer | None,
        config: ExecutorConfig,
        metrics: CollectorRegistry | None = None,
    ) -> None:
        """
        Args:
            tokenizer: None scores text only.
            metrics: registry of the scorer's metrics.
        """
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._turns = asyncio.Semaphore(config.max_concurrent_scores)
        self._scored = Counter(
            "headway_reward_scored_answers",
            "Answers scored outside of rollouts, by verdict or by the code of what went wrong",
            ["reward", "outcome"],
            registry=metrics,
        )
        self._pending = Gauge(
            "headway_reward_pending_answers",
            "Answers to be scored outside of rollouts, waiting or under way",
            registry=metrics,
        )

    async def score(
        self, reward: ComponentConfig, answers: Sequence[AnswerToScore]
    ) -> list[ScoreOutcome]:
        """A result or an error for each answer, in their order.

        Cancelling the call ends what is under way.

        Raises:
            UnknownName, ConfigError: the reward cannot be made, or cannot score here.
            RewardOutage: an answer could not be scored; the same call may be made again.
        """
        await self._scorer.prepare(reward)
        CALLER.set(paths.REWARDS_SCORE)
        self._pending.inc(len(answers))
        try:
            read = await offload(SMALL + 1, self._read, answers)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._judge(reward, answer)) for answer in read]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            self._pending.dec(len(answers))
        return [task.result() for task in tasks]

    async def _judge(self, reward: ComponentConfig, answer: Answer) -> ScoreOutcome:
        async with self._turns:
            try:
                result = await self._scorer.score(reward, answer)
            except ServiceError as error:
                self._scored.labels(reward.name, error.code).inc()
                if error.retryable or not isinstance(error, RewardError | DataError):
                    raise
                return error
        self._scored.labels(reward.name, result.verdict).inc()
        return result

    def _read(self, answers: Sequence[AnswerToScore]) -> list[Answer]:
        return [
            Answer(
                prompt=self._text(answer.prompt or "", answer.prompt_ids),
                completion=self._text(answer.completion or "", answer.completion_ids),
                data=answer.data,
                prompt_ids=list(answer.prompt_ids or ()),
                completion_ids=list(answer.completion_ids or ()),
            )
            for answer in answers
        ]

    def _text(self, given: str, ids: Sequence[int] | None) -> str:
        if ids is None:
            return given
        if self._tokenizer is None:
            raise ConfigError(
                "this server has no tokenizer.json, so it reads no tokens; send the text instead"
            )
        return self._tokenizer.decode(list(ids))
