"""Answers within packed sequences: their prompts, the tokens sampled last, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.batching.sequences import SequenceBatch


@dataclass(frozen=True, slots=True)
class AnswerTextRule:
    """Scores that depend on the text of the answers, for example on their form."""

    decode: Callable[[list[int]], str]
    """Tokens of an answer -> its text."""
    adjust: Callable[[float, str], float]
    """`(score, text) -> score`; pure, so that every rank has the same."""

    def apply(self, scores: list[float], batch: SequenceBatch) -> list[float]:
        """[N] the scores of the sequences of a batch, adjusted."""
        texts = [self.decode(answer) for _, answer in prompts_and_answers(batch)]
        return [self.adjust(*pair) for pair in zip(scores, texts, strict=True)]


def prompts_and_answers(batch: SequenceBatch) -> Iterator[tuple[list[int], list[int]]]:
    """Yield for each sequence the tokens in front of the first sampled one, and the last run of
    sampled ones: what a workflow has scored.

    Args:
        batch: columns `input_ids` and `action_mask`, which is shifted to the predicted token.
    """
    lengths = list(batch.lengths)
    rows = torch.split(batch["input_ids"], lengths)
    for ids, mask in zip(rows, torch.split(batch["action_mask"], lengths), strict=True):
        sampled = (mask.nonzero().squeeze(1) + 1).tolist()
        tokens = ids.tolist()
        if not sampled:
            yield tokens, []
            continue
        breaks = [at for at in range(1, len(sampled)) if sampled[at] != sampled[at - 1] + 1]
        start = sampled[breaks[-1]] if breaks else sampled[0]
        yield tokens[: sampled[0]], tokens[start : sampled[-1] + 1]


def spread_scores(scores: list[float], batch: SequenceBatch) -> Tensor:
    """[T] float32, the score of its sequence at each token."""
    return torch.tensor(scores, dtype=torch.float32).repeat_interleave(
        torch.tensor(batch.lengths), output_size=batch.num_tokens
    )
