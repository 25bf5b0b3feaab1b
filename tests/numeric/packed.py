"""Random columns of packed sequences in float64, and how a slow loop walks them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.algorithms.segments import Segments
from trainer.batching.sequences import SequenceBatch

LENGTHS = (7, 1, 4, 9, 2, 6)


def random_batch(
    seed: int, lengths: tuple[int, ...] = LENGTHS, spread: float = 0.5
) -> SequenceBatch:
    """Columns of a policy loss; a mask with holes, and one sequence with nothing in the loss."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    mask = torch.rand(size, generator=generator) < 0.7
    mask[: lengths[0]] = seed % 2 == 0 and mask[: lengths[0]]
    behaviour = -0.1 - noise(1.0).abs()
    proximal = behaviour + noise(spread)
    return SequenceBatch(
        lengths,
        {
            "loss_mask": mask,
            "behaviour_logprobs": behaviour,
            "proximal_logprobs": proximal,
            "logprobs": proximal + noise(spread),
            "reference_logprobs": behaviour + noise(spread),
            "advantages": noise(1.0),
            "entropy": noise(1.0).abs(),
            "near": torch.rand(size, generator=generator) < 0.8,
            "prepared": torch.rand(size, generator=generator) < 0.3,
            "weight_factor": torch.full((size,), 0.8, dtype=torch.float64),
        },
    )


def segments_of(batch: SequenceBatch) -> Segments:
    return Segments.of_lengths(batch.lengths)


def spans(lengths: tuple[int, ...]) -> Iterator[range]:
    """The rows of each sequence."""
    start = 0
    for length in lengths:
        yield range(start, start + length)
        start += length


def actions(batch: SequenceBatch) -> list[list[int]]:
    """Of each sequence, the rows in the loss."""
    mask = batch["loss_mask"].tolist()
    return [[t for t in rows if mask[t]] for rows in spans(batch.lengths)]


def spoilt(column: Tensor, mask: Tensor, value: float) -> Tensor:
    """The column with `value` wherever the mask is false."""
    return torch.where(mask, column, value)
