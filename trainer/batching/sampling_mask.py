"""Sampling masks of packed sequences: the tokens that could be drawn at each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.contracts.types import Trajectory
from trainer.transfer import to_device

CUT_LOGIT = -1e30
"""Logit of a token that could not be drawn: its probability is 0 to the bit, and no product with it is
infinite, as one with minus infinity would be."""


@dataclass(frozen=True, slots=True)
class PackedSamplingMask:
    """Pairs of a position and a token that could be drawn there; every token could at a position without
    any pair."""

    num_positions: int
    """T."""
    positions: Tensor  # [K] int64, ascending
    tokens: Tensor  # [K] int64

    @staticmethod
    def of(trajectories: Sequence[Trajectory]) -> PackedSamplingMask | None:
        """The masks of trajectories end to end, each token's at the position that predicts it; None if
        nothing was cut."""
        ends = np.cumsum([row.num_tokens for row in trajectories])
        positions, tokens = [], []
        for row, end in zip(trajectories, ends.tolist(), strict=True):
            mask = row.sampling_mask
            if mask is not None and len(mask.tokens):
                sampled_at = np.repeat(np.arange(len(mask)), mask.counts)
                positions.append(sampled_at + (end - len(mask) - 1))
                tokens.append(mask.tokens)
        if not positions:
            return None
        return PackedSamplingMask(
            int(ends[-1]),
            torch.from_numpy(np.concatenate(positions)),
            torch.from_numpy(np.concatenate(tokens)).to(torch.int64),
        )

    def spans(self, spans: Sequence[tuple[int, int]]) -> PackedSamplingMask:
        """The mask of these spans of positions, one behind the other."""
        edges = torch.tensor(spans).to(self.positions.device)
        bounds = torch.searchsorted(self.positions, edges).tolist()
        positions, tokens, length = [], [], 0
        for (start, end), (first, last) in zip(spans, bounds, strict=True):
            positions.append(self.positions[first:last] + (length - start))
            tokens.append(self.tokens[first:last])
            length += end - start
        return PackedSamplingMask(length, torch.cat(positions), torch.cat(tokens))

    def rows(self, rows: Tensor) -> PackedSamplingMask:
        """The mask of these positions [M], ascending. On a GPU, which nobody waits for, pairs of other
        positions stay, at position M."""
        places = torch.full((self.num_positions,), len(rows), device=rows.device)
        places[rows] = torch.arange(len(rows), device=rows.device)
        positions, tokens = places[self.positions], self.tokens
        if not positions.is_cuda:
            is_chosen = positions < len(rows)
            positions, tokens = positions[is_chosen], tokens[is_chosen]
        return PackedSamplingMask(len(rows), positions, tokens)

    def to(self, device: torch.device) -> PackedSamplingMask:
        """The mask on another device; to a GPU, without waiting for it."""
        return PackedSamplingMask(
            self.num_positions, to_device(self.positions, device), to_device(self.tokens, device)
        )

    def cut_(self, logits: Tensor, rows: slice, columns: slice) -> Tensor:
        """Set the logits of tokens that could not be drawn to `CUT_LOGIT`, in place.

        Args:
            logits: [t, v], of these positions and of these tokens of the vocabulary.
        """
        positions, tokens = self.positions, self.tokens
        if not logits.is_cuda:
            edges = torch.tensor([rows.start, rows.stop])
            first, last = torch.searchsorted(positions, edges).tolist()
            positions, tokens = positions[first:last], tokens[first:last]
        return cut_tile_(logits, positions - rows.start, tokens - columns.start)


def cut_tile_(logits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Set logits of a tile [t, v] to `CUT_LOGIT`, in place: those without a pair, in rows that have one.

    Args:
        rows, columns: [K] int64 pairs, in the tile or outside of it.
    """
    num_rows, num_columns = logits.shape
    is_row = (rows >= 0) & (rows < num_rows)
    is_inside = is_row & (columns >= 0) & (columns < num_columns)
    # One more element takes what is elsewhere: choosing pairs would wait for the device.
    size = num_rows * num_columns
    is_left = torch.zeros(size + 1, dtype=torch.bool, device=logits.device)
    is_left[torch.where(is_inside, rows * num_columns + columns, size)] = True
    is_cut = torch.zeros(num_rows + 1, dtype=torch.bool, device=logits.device)
    is_cut[torch.where(is_row, rows, num_rows)] = True
    is_out = ~is_left[:size].view(num_rows, num_columns) & is_cut[:num_rows, None]
    return logits.masked_fill_(is_out, CUT_LOGIT)
