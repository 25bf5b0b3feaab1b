"""One row of tokens as a rollout writes it: what the policy sampled, and what it was shown.

Everything is tokens: what was sampled enters as the server answered it, is never decoded and encoded
again, and stands in the next turn's prompt as it is. So the row that is trained is the row that was
sampled from, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gateway.trajectories.sample import Sample
from headway.contracts.errors import BackendError
from headway.contracts.routed_experts import RoutedExperts, join_experts
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import (
    LLMResponse,
    RewardResult,
    StopReason,
    Trajectory,
    Turn,
)

NOT_SAMPLED = -1
"""Version of a token that the policy did not sample."""


class Transcript:
    """A row that only grows: `observe` what the policy is shown, `sample` what it answers.

    `ids` is the prompt of the next turn. At the end, `trajectory` makes the row that is trained.
    """

    def __init__(self, ids: Sequence[int] = ()) -> None:
        """
        Args:
            ids: what stands in front of the first turn.
        """
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._turns: list[Turn] = []
        self._masks: list[tuple[int, SamplingMask]] = []
        """Where each begins; where none is, nothing was cut."""
        self._experts: RoutedExperts | None = None
        self.observe(ids)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens so far: the prompt of the next turn."""
        return tuple(self._ids)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The sampled stretches so far."""
        return tuple(self._turns)

    def ids_of(self, turn: int) -> list[int]:
        """Return the tokens that one turn sampled; -1 is the last."""
        return self._ids[self._turns[turn].start : self._turns[turn].end]

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy is shown: they are not in the loss."""
        self._ids += ids
        self._logprobs += [0.0] * len(ids)
        self._versions += [NOT_SAMPLED] * len(ids)

    def sample(self, response: LLMResponse) -> int:
        """Append what one turn sampled; returns the number of the turn, from 0.

        Raises:
            BackendError: the server's tokens, logprobs and versions do not match.
        """
        tokens, versions = response.output_tokens, response.output_versions
        if not len(tokens) == len(response.output_logprobs) == len(versions):
            raise BackendError(
                f"request {response.rid!r} was answered with {len(tokens)} tokens, "
                f"{len(response.output_logprobs)} logprobs and {len(versions)} versions; "
                "a server must report one of each per token"
            )
        start = len(self._ids)
        if response.sampling_mask is not None:
            problem = response.sampling_mask.problem(tokens)
            if problem is not None:
                raise BackendError(f"request {response.rid!r} was answered with {problem}")
            self._masks.append((start, response.sampling_mask))
        self._experts = join_experts([self._experts, response.routed_experts])
        self._ids += tokens
        self._logprobs += response.output_logprobs
        self._versions += versions
        self._turns.append(Turn(start, len(self._ids), response.stop_reason))
        return len(self._turns) - 1

    def annotate(self, turn: int, reward: float | None = None, **note: Any) -> None:
        """Store a turn's own reward, or notes for viewers; what is not given stays as it was.

        Args:
            turn: its number; -1 is the last.
            note: values that JSON can hold.
        """
        old = self._turns[turn]
        self._turns[turn] = Turn(
            old.start,
            old.end,
            old.stop_reason,
            old.reward if reward is None else reward,
            {**old.note, **note},
        )

    def trajectory(
        self,
        sample: Sample,
        result: RewardResult,
        branch: int = 0,
        stop_reason: StopReason | None = None,
    ) -> Trajectory:
        """The row as it is now, with the columns that a trainer needs.

        Args:
            sample: what was asked; gives the row its names.
            result: score of the whole row.
            branch: number of the history, if the sample has several.
            stop_reason: why the rollout ended, if not for the reason that its last turn did.
        """
        versions = np.array(self._versions, dtype=np.int32)
        return Trajectory(
            rollout_id=sample.rollout_id,
            group_id=sample.prompt.group_id,
            sample_index=sample.index,
            input_ids=np.array(self._ids, dtype=np.int32),
            loss_mask=versions != NOT_SAMPLED,
            logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=versions,
            reward=result.score,
            stop_reason=stop_reason or (self._turns[-1].stop_reason if self._turns else "stop"),
            verdict=result.verdict,
            details=result.details,
            turns=self._reported_turns(),
            branch=branch,
            sampling_mask=self._whole_mask(),
            routed_experts=self._experts,
        )

    def _whole_mask(self) -> SamplingMask | None:
        """The mask over all positions; None if no turn has one."""
        if not self._masks:
            return None
        parts, end = [], 0
        for start, mask in self._masks:
            parts += [SamplingMask.whole(start - end), mask]
            end = start + len(mask)
        return SamplingMask.join([*parts, SamplingMask.whole(len(self._ids) - end)])

    def _reported_turns(self) -> tuple[Turn, ...]:
        """A single turn with nothing to report is left out."""
        turns = tuple(self._turns)
        is_plain = len(turns) < 2 and all(t.reward is None and not t.note for t in turns)
        return () if is_plain else turns
