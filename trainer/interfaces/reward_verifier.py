"""Scores of a whole batch by a reward of the rollout service: verifiers, programs in its sandbox, a model
that it asks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from headway.contracts.config.base import ComponentConfig
from headway.contracts.engines import SCORE_TIMEOUT_S
from headway.contracts.errors import ErrorBody, ServiceError
from headway.contracts.http.rewards import AnswerToScore
from headway.contracts.types import RewardResult, Trajectory
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.answers import AnswerTextRule, prompts_and_answers, spread_scores
from trainer.interfaces.base import Columns
from trainer.rollout_id import position_of
from trainer.topology import Topology

RowOf = Callable[[int], Mapping[str, Any]]
"""Number in the column `row` -> data row."""


class ScoreClient(Protocol):
    """Part of an `InferenceEngine` that is needed here."""

    def score(
        self,
        reward: ComponentConfig,
        answers: Sequence[AnswerToScore],
        timeout: float = SCORE_TIMEOUT_S,
        failed_score: float | None = None,
    ) -> list[RewardResult]:
        """See `InferenceEngine.score`."""


class VerifierReward:
    """A reward in the place of a model. Batches are whole, the same on every rank.

    Rank 0 asks the service; every rank has the scores, or the error.
    """

    def __init__(
        self,
        client: ScoreClient | None,
        topology: Topology,
        reward: ComponentConfig,
        row_of: RowOf,
        timeout_s: float = SCORE_TIMEOUT_S,
        failed_score: float | None = None,
        rule: AnswerTextRule | None = None,
    ) -> None:
        """
        Args:
            client: None on ranks other than the first.
            row_of: called on the first rank.
            timeout_s: for a whole batch.
            failed_score: of an answer whose verifier fails; None ends the step.
            rule: applied to the scores.
        """
        self._client = client
        self._topology = topology
        self._reward = reward
        self._row_of = row_of
        self._timeout_s = timeout_s
        self._failed_score = failed_score
        self._rule = rule

    def inference(self, batch: SequenceBatch) -> Columns:
        """`scores` [T], the same all over each sequence; collective.

        Each branch of a sample is scored by itself.

        Args:
            batch: columns `input_ids`, `action_mask`, and `row` int64 (`with_rows`).
        Raises:
            ServiceError: of `InferenceEngine.score`, on every rank.
        """
        payload = None if self._client is None else self._ask(self._client, batch)
        reply = json.loads(self._topology.broadcast_bytes(payload))
        if "error" in reply:
            raise ServiceError.from_body(ErrorBody(**reply["error"]))
        return {"scores": spread_scores(reply["scores"], batch)}

    def _ask(self, client: ScoreClient, batch: SequenceBatch) -> bytes:
        """Return the reply, or the error, for all ranks: one that raised alone would leave the others
        waiting.
        """
        try:
            results = client.score(
                self._reward, self._answers(batch), self._timeout_s, self._failed_score
            )
        except ServiceError as error:
            return json.dumps({"error": error.to_body().model_dump()}).encode()
        scores = [result.score for result in results]
        if self._rule is not None:
            scores = self._rule.apply(scores, batch)
        return json.dumps({"scores": scores}).encode()

    def _answers(self, batch: SequenceBatch) -> list[AnswerToScore]:
        numbers = batch.per_sequence("row").tolist()
        pairs = zip(numbers, prompts_and_answers(batch), strict=True)
        return [
            AnswerToScore(
                prompt_ids=tuple(prompt),
                completion_ids=tuple(answer),
                data=dict(self._row_of(number)),
            )
            for number, (prompt, answer) in pairs
        ]


def with_rows(batch: SequenceBatch, trajectories: Sequence[Trajectory]) -> SequenceBatch:
    """Add `row` [T] int64: the position of a trajectory's prompt in the order of the data.

    Args:
        batch: of these trajectories, in their order.
    """
    numbers = [position_of(row.rollout_id) for row in trajectories]
    column = torch.tensor(numbers, dtype=torch.int64).repeat_interleave(
        torch.tensor(batch.lengths), output_size=batch.num_tokens
    )
    return batch.with_columns(row=column)
