"""Changes of logits before a token is drawn: penalties, biases, grammars, ends that come too early."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headway.contracts.config.sampling import SamplingConfig
from inference_server.backends.embedded.device import Device
from inference_server.backends.embedded.grammar import GrammarState
from inference_server.backends.embedded.sampling_rows import Columns, SamplingRow


class LogitBias(Columns):
    """Added to single logits."""

    @staticmethod
    def of(configs: Sequence[SamplingConfig]) -> LogitBias | None:
        entries = [
            (row, token, value)
            for row, config in enumerate(configs)
            for token, value in config.logit_bias.items()
        ]
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return LogitBias(torch.tensor(rows), torch.tensor(tokens), torch.tensor(values))

    def apply(self, logits: Tensor) -> Tensor:
        """[n, V] with the bias."""
        rows, tokens, values = self.columns
        return logits.index_put((rows, tokens), values, accumulate=True)


class GrammarMasks(Columns):
    """Forbid what grammars do not allow next."""

    def __init__(self, rows: list[int], states: list[GrammarState], device: Device) -> None:
        super().__init__(torch.tensor(rows))
        self._states = states
        self._device = device
        self._allowed: Tensor | None = None

    @staticmethod
    def of(rows: Sequence[SamplingRow], device: Device) -> GrammarMasks | None:
        bound = [(at, row.grammar) for at, row in enumerate(rows) if row.grammar is not None]
        if not bound:
            return None
        return GrammarMasks([at for at, _ in bound], [state for _, state in bound], device)

    def apply(self, logits: Tensor, is_same: bool) -> Tensor:
        """[n, V] with what is forbidden at minus infinity.

        Args:
            is_same: nothing was drawn since the last call.
        """
        if self._allowed is None or not is_same:
            allowed = np.stack([state.allowed() for state in self._states])
            (self._allowed,) = self._device.send([torch.from_numpy(allowed)])
        (rows,) = self.columns
        chosen = logits[rows].masked_fill(~self._allowed, float("-inf"))
        return logits.index_copy(0, rows, chosen)


class EarlyStops(Columns):
    """Tokens that must not be sampled before `min_new_tokens`."""

    def __init__(self, entries: list[tuple[int, int, int]]) -> None:
        """
        Args:
            entries: row, token, and how many more tokens it is forbidden for.
        """
        super().__init__(*(torch.tensor(column) for column in zip(*entries, strict=True)))
        self._longest = max(remaining for _, _, remaining in entries)

    @staticmethod
    def of(rows: Sequence[SamplingRow], vocab_size: int) -> EarlyStops | None:
        entries = [
            (index, token, row.config.min_new_tokens - len(row.output))
            for index, row in enumerate(rows)
            if row.config.min_new_tokens > len(row.output)
            for token in row.stop_ids
            if token < vocab_size
        ]
        return EarlyStops(entries) if entries else None

    @property
    def is_due(self) -> bool:
        """True if a row is still below its minimum length."""
        return self._longest > 0

    def apply(self, logits: Tensor) -> Tensor:
        """[n, V] with what is forbidden at minus infinity."""
        rows, tokens, remaining = self.columns
        values = logits[rows, tokens].masked_fill(remaining > 0, float("-inf"))
        return logits.index_put((rows, tokens), values)

    def count(self) -> None:
        """Each row has one more token."""
        self._longest -= 1
        rows, tokens, remaining = self.columns
        self.columns = (rows, tokens, remaining - 1)


class Penalties(Columns):
    """Presence, frequency and repetition penalties, with the counts they need."""

    def __init__(self, rows: list[int], chosen: list[SamplingRow], vocab_size: int) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values)[:, None]

        super().__init__(
            torch.tensor(rows),
            _flat([row.prompt for row in chosen], vocab_size),
            _flat([row.output for row in chosen], vocab_size),
            column([row.config.presence_penalty for row in chosen]),
            column([row.config.frequency_penalty for row in chosen]),
            column([row.config.repetition_penalty for row in chosen]),
        )
        self._shape = (len(rows), vocab_size)
        self._counts: Tensor | None = None
        self._in_prompt: Tensor | None = None

    @staticmethod
    def of(rows: Sequence[SamplingRow], vocab_size: int) -> Penalties | None:
        indices = [
            index
            for index, row in enumerate(rows)
            if row.config.presence_penalty
            or row.config.frequency_penalty
            or row.config.repetition_penalty != 1.0
        ]
        if not indices:
            return None
        return Penalties(indices, [rows[i] for i in indices], vocab_size)

    def apply(self, logits: Tensor) -> Tensor:
        """[n, V] with the penalties."""
        rows, prompt, output, presence, frequency, repetition = self.columns
        if self._counts is None or self._in_prompt is None:
            self._counts = _histogram(output, self._shape)
            self._in_prompt = _histogram(prompt, self._shape) > 0
        chosen = logits[rows]
        seen = (self._counts > 0) | self._in_prompt
        repeated = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        chosen = torch.where(seen, repeated, chosen)
        chosen = chosen - frequency * self._counts
        chosen = chosen - presence * (self._counts > 0)
        return logits.index_copy(0, rows, chosen)

    def count(self, tokens: Tensor) -> None:
        """Remember what was sampled."""
        assert self._counts is not None
        chosen = tokens[self.columns[0]][:, None]
        self._counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=self._counts.dtype))


def _flat(rows: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """Return the index of each token of each row in a table [rows, V], flattened."""
    parts = [torch.tensor(row, dtype=torch.long) + i * vocab_size for i, row in enumerate(rows)]
    return torch.cat(parts)


def _histogram(places: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return [rows, V] float32, how often each position is named."""
    counts = torch.zeros(shape[0] * shape[1], device=places.device)
    return counts.scatter_add_(0, places, torch.ones_like(places, dtype=counts.dtype)).view(shape)
