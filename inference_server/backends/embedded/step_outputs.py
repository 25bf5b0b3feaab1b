"""What a step finds out: tensors of the device, and their meaning once they are read back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.contracts.types import LLMDelta, PolicyVersion, TopLogprobs
from inference_server.backends.embedded.sampler import Sampled, StepMasks, top_logprobs
from inference_server.backends.embedded.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Sampled token of one sequence in one step."""

    sequence: Sequence
    token: int
    logprob: float
    """Logprob of the token; not finite where the logits are not."""
    top: TopLogprobs | None
    """Alternatives, if it asks for them."""
    left: NDArray[np.int32] | None = None
    """Ids of the tokens that were left to draw from, ascending, if it asks for its sampling mask."""
    place: int = 0
    """Number of guessed tokens before it in the step, all of them right."""

    def delta(self, version: PolicyVersion) -> LLMDelta:
        """Return the delta that its caller gets."""
        return LLMDelta(
            output_tokens=[self.token],
            output_logprobs=[self.logprob],
            version=version,
            top_logprobs=None if self.top is None else [self.top],
        )


class TopTokens:
    """The most likely tokens of those rows of logits that ask for them."""

    def __init__(self, logits: Tensor, counts: list[int], is_host: bool) -> None:
        """
        Args:
            counts: how many each row asks for, or 0.
        """
        self._counts = counts
        wanted = sorted(set(counts) - {0})
        if is_host:
            self._groups = [[r for r, own in enumerate(counts) if own == n] for n in wanted]
        else:  # all rows at once: choosing some would take a copy to the device
            self._groups = [list(range(len(counts)))] if wanted else []
            wanted = wanted[-1:]
        self.tensors: list[Tensor] = []
        for rows, count in zip(self._groups, wanted, strict=True):
            chosen = logits if len(rows) == len(counts) else logits[rows]
            self.tensors += top_logprobs(chosen, count)

    def read(self, read: list[Tensor]) -> dict[int, TopLogprobs]:
        """Return the top logprobs by row, from the values read back of `tensors`."""
        found: dict[int, TopLogprobs] = {}
        for index, rows in enumerate(self._groups):
            tokens, values = read[2 * index].tolist(), read[2 * index + 1].tolist()
            for row, ids, logprobs in zip(rows, tokens, values, strict=True):
                pairs = [  # what a grammar forbids is no alternative
                    pair for pair in zip(ids, logprobs, strict=True) if pair[1] > -math.inf
                ]
                if self._counts[row]:
                    found[row] = pairs[: self._counts[row]]
        return found


class PromptScores:
    """Logprobs of prompt tokens: row i of the logits predicts the token at `scored[i]`."""

    def __init__(
        self, scored: list[tuple[Sequence, int]], logits: Tensor, targets: Tensor, is_host: bool
    ) -> None:
        """
        Args:
            logits: [S, V]; targets: [S] the tokens that they predict.
        """
        self._scored = scored
        self.tensors: list[Tensor] = []
        if scored:
            table = torch.log_softmax(logits.float(), dim=-1)
            self._tops = TopTokens(table, [s.request.top_logprobs for s, _ in scored], is_host)
            self.tensors = [table.gather(1, targets[:, None])[:, 0], *self._tops.tensors]

    def record(self, read: list[Tensor]) -> None:
        """Write down what was read back of `tensors`."""
        if not self._scored:
            return
        tops = self._tops.read(read[1:])
        for row, logprob in enumerate(read[0].tolist()):
            sequence, position = self._scored[row]
            sequence.prompt_logprobs[position] = logprob
            if row in tops:
                sequence.prompt_top[position] = tops[row]


class StepSamples:
    """Tokens drawn in one step."""

    def __init__(
        self,
        sequences: list[Sequence],
        sampled: Sampled,
        logits: Tensor,
        uniforms: Tensor,
        is_host: bool,
    ) -> None:
        self.sequences = sequences
        self.logits = logits
        self.uniforms = uniforms
        counts = [sequence.request.top_logprobs for sequence in sequences]
        self._tops = TopTokens(sampled.scaled, counts, is_host)
        checked = [] if sampled.is_enough is None else [sampled.is_enough]
        self._num_checked = len(checked)
        self.is_final = not checked
        """True if no later check can require drawing again."""
        self._masks = sampled.masks
        masks = [] if self._masks is None else [self._masks.counts, self._masks.tokens]
        self._first_top = 2 + len(checked) + len(masks)
        self.tensors = [sampled.tokens, sampled.logprobs, *checked, *masks, *self._tops.tensors]

    def is_enough(self, read: list[Tensor]) -> bool:
        """True if the values read back of `tensors` pass their checks; otherwise it is drawn again,
        from whole rows.
        """
        return all(bool(part.all()) for part in read[2 : 2 + self._num_checked])

    def outcomes(self, read: list[Tensor]) -> list[SampledToken]:
        """One for each row, from what was read back of `tensors`."""
        tops = self._tops.read(read[self._first_top : len(self.tensors)])
        left: dict[int, NDArray[np.int32]] = {}
        if self._masks is not None:
            left = tokens_left(self._masks, *read[self._first_top - 2 : self._first_top])
        pairs = zip(read[0].tolist(), read[1].tolist(), strict=True)
        return [
            SampledToken(self.sequences[row], token, logprob, tops.get(row), left.get(row))
            for row, (token, logprob) in enumerate(pairs)
        ]


def tokens_left(masks: StepMasks, counts: Tensor, tokens: Tensor) -> dict[int, NDArray[np.int32]]:
    """Return the ids left by row, ascending.

    Args:
        counts, tokens: those of the masks, read back.
    """
    sizes = counts.tolist()
    if tokens.ndim == 1:
        ids = np.split(tokens.numpy(), np.cumsum(sizes)[:-1])
    else:
        ids = [np.sort(row[:size]) for row, size in zip(tokens.numpy(), sizes, strict=True)]
    return dict(zip(masks.rows, ids, strict=True))
