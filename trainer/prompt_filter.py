"""Filter of the prompts still worth a rollout: those that are not too long, and have not become too
easy.

A prompt leaves at the end of an epoch, and for good. The order of the data stays as it is, and a position
always means the same row: what left is passed over. So a run that resumes may decide otherwise than the
one that crashed, and still never submits other content under an id that is known.

An epoch ends where the first prompt of the next one is submitted. Trajectories of its last batches are
under way by then (more of them, the larger `rollout.max_staleness`); their scores count at the end of the
next.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from headway.contracts.config.ppo_code import VerifiedPPOExperiment
from headway.contracts.config.rollout_experiments import PolicyLearner
from headway.contracts.context import (
    RAISE_IT,
    begins_with_prompt,
    check_context,
    first_new_tokens,
    most_tokens,
)
from headway.contracts.errors import ConfigError, DataError
from trainer.algorithms.curriculum import easy_prompts
from trainer.data import PromptData
from trainer.data_supervised import Encoder

log = logging.getLogger(__name__)


def long_prompts(data: PromptData, encoder: Encoder, chat: bool, max_tokens: int) -> set[int]:
    """Rows whose prompts have more tokens.

    Args:
        encoder: of the policy's tokenizer.
        chat: prompts are rendered with its chat template.
    """
    prompts = encoder.prompts(data, chat)
    return {row for row, ids in enumerate(prompts) if len(ids) > max_tokens}


def filled_prompts(prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Lengthen prompts to `length` tokens by repeats of their last one in front; longer ones stay."""
    return [[ids[-1]] * (length - len(ids)) + list(ids) for ids in prompts]


def unfit_prompts(data: PromptData, config: PolicyLearner, limit: int) -> set[int]:
    """Rows whose first request no server could hold, as far as that is known.

    Args:
        limit: tokens per sequence, prompt included.
    Raises:
        RequestTooLong: all of them.
    """
    workflow, chat = config.rollout.workflow, config.data.chat
    rows = range(len(data))
    new = [data.max_new_tokens_of(row) or config.sampling.max_new_tokens for row in rows]
    if not begins_with_prompt(workflow) or all(
        most_tokens(_texts(data, row, chat)) + new[row] <= limit for row in rows
    ):
        return set()
    try:
        prompts = Encoder(config.model.path).prompts(data, chat)
    except (ConfigError, DataError) as error:
        log.warning("whether all prompts fit is not known", extra={"reason": str(error)})
        return set()
    lengths = [len(ids) for ids in prompts]
    needs = [lengths[row] + first_new_tokens(workflow, lengths[row], new[row]) for row in rows]
    unfit = {row for row in rows if needs[row] > limit}
    if len(unfit) == len(data):
        shortest = min(rows, key=needs.__getitem__)
        length = lengths[shortest]
        where = f"none of {len(data)} prompts fit; the shortest, {data.place(shortest)}: "
        check_context(length, needs[shortest] - length, limit, where)
    if unfit:
        longest = max(unfit, key=needs.__getitem__)
        log.warning(
            "prompts are left out: with max_new_tokens they exceed the context of the servers",
            extra={
                "prompts": len(unfit),
                "of": len(data),
                "longest": data.place(longest),
                "prompt_tokens": lengths[longest],
                "max_new_tokens": needs[longest] - lengths[longest],
                "context": limit,
                "remedy": f"shorten them, lower sampling.max_new_tokens, or {RAISE_IT}",
            },
        )
    return unfit


def _texts(data: PromptData, row: int, chat: bool) -> list[str]:
    return [m.content for m in data.messages_of(row)] if chat else [data.text_of(row)]


class PromptFilter:
    """Keeps the mean reward of each row's last group; only the rank that submits prompts needs one."""

    def __init__(
        self,
        data: PromptData,
        threshold: float,
        max_share: float,
        left_out: Collection[int] = (),
    ) -> None:
        """
        Args:
            threshold: a row leaves whose mean reward is above this.
            max_share: at most this share of the active rows leaves at a time.
            left_out: rows that are never active.
        Raises:
            DataError: no row is.
        """
        self._data = data
        self._threshold = threshold
        self._max_share = max_share
        self._never = frozenset(left_out)
        self._left: set[int] = set()
        self._rewards: dict[int, float] = {}
        self._epoch = 0
        """Epoch that is being submitted."""
        self._refuse_none()

    @property
    def active(self) -> list[int]:
        """Active rows, in the order of the data set."""
        out = self._never | self._left
        return [row for row in range(len(self._data)) if row not in out]

    def leave_out(self, rows: Collection[int]) -> None:
        """Make further rows inactive for good.

        Raises:
            DataError: no row is left.
        """
        self._never |= frozenset(rows)
        self._refuse_none()

    def observe(self, positions: Sequence[int], rewards: Sequence[float]) -> None:
        """Take the rewards of a batch.

        Args:
            positions: position of each trajectory's prompt in the order of the data; of whole groups, or
                of the samples of each that are learned from.
            rewards: of each trajectory, after bias and scaling, not clipped.
        """
        groups: dict[int, list[float]] = {}
        for position, reward in zip(positions, rewards, strict=True):
            groups.setdefault(position, []).append(reward)
        for position, values in groups.items():
            self._rewards[self._data.row_index(position)] = sum(values) / len(values)

    def take(self, cursor: int, count: int) -> tuple[list[int], int]:
        """Return the next active prompts.

        Args:
            cursor: position behind the last one that was looked at.
            count: number of prompts wanted.
        Returns:
            Their positions, and the position behind the last of them: `cursor + count` plus what was
            passed over.
        Raises:
            DataError: no row is active any more.
        """
        taken: list[int] = []
        while len(taken) < count:
            while self._epoch < cursor // len(self._data):
                self._end_epoch()
            if self._is_active(self._data.row_index(cursor)):
                taken.append(cursor)
            cursor += 1
        return taken, cursor

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint: the epoch, the rows that left, and the rewards."""
        rewards = {f"reward.{row}": reward for row, reward in self._rewards.items()}
        left = {f"left.{row}": 1.0 for row in sorted(self._left)}
        return {"epoch": float(self._epoch), **left, **rewards}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the values that `state_dict` returned for the same data set.

        Raises:
            DataError: it is of a data set with more rows, or none is active.
        """
        named = [(name.partition("."), value) for name, value in state.items()]
        self._epoch = int(state["epoch"])
        self._left = {int(row) for (kind, _, row), _ in named if kind == "left"}
        self._rewards = {int(row): value for (kind, _, row), value in named if kind == "reward"}
        last = max((*self._left, *self._rewards), default=0)
        if last >= len(self._data):
            raise DataError(
                f"the checkpoint knows prompt {last + 1}, and the data set has {len(self._data)} rows; "
                "resume with the data that the run began with"
            )
        self._refuse_none()

    def _is_active(self, row: int) -> bool:
        return row not in self._left and row not in self._never

    def _end_epoch(self) -> None:
        self._epoch += 1
        names = [str(row) for row in self.active]
        rewards = {str(row): reward for row, reward in self._rewards.items()}
        easy = easy_prompts(names, rewards, self._threshold, self._max_share)
        self._left |= {int(name) for name in easy}
        self._refuse_none()

    def _refuse_none(self) -> None:
        if not self.active:
            raise DataError(
                f"of {len(self._data)} prompts {len(self._never)} are too long and {len(self._left)} had "
                f"rewards above {self._threshold:g}: none is left; raise dataset_filter_threshold, lower "
                "dataset_max_filter_percentage, or allow longer prompts"
            )


def make_prompt_filter(config: PolicyLearner, data: PromptData) -> PromptFilter | None:
    """Return the filter of what the configuration leaves out, now or later; None if it leaves out
    nothing.

    Raises:
        DataError: it leaves nothing.
    """
    if not isinstance(config, VerifiedPPOExperiment):
        return None
    ppo, max_tokens = config.ppo, config.rollout.max_prompt_tokens
    if max_tokens is None and ppo.dataset_max_filter_percentage == 0.0:
        return None
    left_out: set[int] = set()
    if max_tokens is not None:
        encoder, chat = Encoder(config.model.path), config.data.chat
        left_out = long_prompts(data, encoder, chat, max_tokens)
        if config.rollout.fill_to_max_length:
            data.send_token_ids(filled_prompts(encoder.prompts(data, chat), max_tokens))
    share = ppo.dataset_max_filter_percentage
    return PromptFilter(data, ppo.dataset_filter_threshold, share, left_out)


def without_unfit(
    known: PromptFilter | None, config: PolicyLearner, data: PromptData, limit: int | None
) -> PromptFilter | None:
    """Return the filter, which also leaves out prompts that fit on no server; None if none are left out.

    Args:
        limit: tokens per sequence, prompt included; None is not known.
    Raises:
        RequestTooLong: no prompt fits.
        DataError: no prompt is left.
    """
    unfit = set() if limit is None else unfit_prompts(data, config, limit)
    if not unfit:
        return known
    left = PromptFilter(data, threshold=0.0, max_share=0.0) if known is None else known
    left.leave_out(unfit)
    return left
