"""Scores of a whole batch by a reward of the rollout service: verifiers, programs in its sandbox, a model
that it asks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from headway.contracts.config.base import PartConfig
from headway.contracts.engines import SCORE_TIMEOUT_S
from headway.contracts.errors import ErrorBody, ServiceError
from headway.contracts.http.rewards import AnswerToScore
from headway.contracts.types import RewardResult, Trajectory
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.answers import TextRule, prompts_and_answers, spread_scores
from trainer.interfaces.base import Columns
from trainer.topology import Topology

RowOf = Callable[[int], Mapping[str, Any]]
"""Number in the column `row` -> data row."""


class Scores(Protocol):
    """What is needed of an `InferenceEngine`."""

    def score(
        self,
        reward: PartConfig,
        answers: Sequence[AnswerToScore],
        timeout: float = SCORE_TIMEOUT_S,
        failed_score: float | None = None,
    ) -> list[RewardResult]:
        """As of `InferenceEngine`."""


class VerifierReward:
    """A reward in the place of a model. Batches are whole, the same on every rank.

    Rank 0 asks the service; every rank has the scores, or the error.
    """

    def __init__(
        self,
        client: Scores | None,
        topology: Topology,
        reward: PartConfig,
        row_of: RowOf,
        timeout_s: float = SCORE_TIMEOUT_S,
        failed_score: float | None = None,
        rule: TextRule | None = None,
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

        Branches of a sample are judged each by itself.

        Args:
            batch: columns `input_ids`, `action_mask`, and `row` int64 (`with_rows`).
        Raises:
            ServiceError: of `InferenceEngine.score`, on every rank.
        """
        payload = None if self._client is None else self._ask(self._client, batch)
        told = json.loads(self._topology.broadcast_bytes(payload))
        if "error" in told:
            raise ServiceError.from_body(ErrorBody(**told["error"]))
        return {"scores": spread_scores(told["scores"], batch)}

    def _ask(self, client: Scores, batch: SequenceBatch) -> bytes:
        """For all ranks: one that raised alone would leave the others waiting."""
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
    """With `row` [T] int64: where in the order of the data a trajectory's prompt stood.

    Its rollout id ends with that.

    Args:
        batch: of these trajectories, in their order.
    """
    numbers = [int(row.rollout_id.rpartition(".")[2]) for row in trajectories]
    column = torch.tensor(numbers, dtype=torch.int64).repeat_interleave(
        torch.tensor(batch.lengths), output_size=batch.num_tokens
    )
    return batch.with_columns(row=column)
