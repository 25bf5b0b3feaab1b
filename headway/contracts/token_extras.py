"""What only some trajectories have for their tokens, cut out of the columns of a payload."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.contracts.errors import DataError
from headway.contracts.routed_experts import PackedExperts, RoutedExperts
from headway.contracts.sampling_mask import SamplingMask


def masks_of(
    counts: NDArray[np.int32],
    tokens: NDArray[np.int32],
    sizes: Sequence[int | None],
    lengths: Sequence[int],
) -> list[SamplingMask | None]:
    """The sampling mask of each trajectory [N].

    Args:
        counts: of all positions that have one.
        tokens: of all masks.
        sizes: tokens of each trajectory's mask; None has none.
        lengths: of the trajectories.
    Raises:
        DataError: they do not fit together.
    """
    num_counts = sum(
        length for length, size in zip(lengths, sizes, strict=True) if size is not None
    )
    if (len(counts), len(tokens)) != (num_counts, sum(size or 0 for size in sizes)):
        raise DataError(
            f"trajectory payload is inconsistent: sampling masks of {len(counts)} positions and "
            f"{len(tokens)} tokens, {num_counts} and {sum(size or 0 for size in sizes)} are announced"
        )
    masks: list[SamplingMask | None] = []
    position = token = 0
    for length, size in zip(lengths, sizes, strict=True):
        if size is None:
            masks.append(None)
            continue
        own = counts[position : position + length]
        masks.append(SamplingMask(own, tokens[token : token + size]))
        if int(own.min()) < 0 or int(own.sum(dtype=np.int64)) != size:
            raise DataError(
                f"trajectory payload is inconsistent: a sampling mask of {size} tokens has other counts"
            )
        position, token = position + length, token + size
    return masks


def experts_of(
    content: bytes, sizes: Sequence[tuple[int, int, int, int] | None], lengths: Sequence[int]
) -> list[RoutedExperts | None]:
    """The routed experts of each trajectory [N].

    Args:
        content: of all of them.
        sizes: tokens, layers, experts per token and bytes per expert; None has none.
        lengths: of the trajectories.
    Raises:
        DataError: they do not fit together.
    """
    found: list[RoutedExperts | None] = []
    start = 0
    for length, size in zip(lengths, sizes, strict=True):
        if size is None:
            found.append(None)
            continue
        num_tokens, num_layers, top_k, width = size
        if not (0 <= num_tokens <= length and num_layers > 0 and top_k > 0 and width in (1, 2)):
            raise DataError(f"trajectory payload has routed experts {size} of {length} tokens")
        end = start + num_tokens * num_layers * top_k * width
        part = PackedExperts(
            num_layers=num_layers, top_k=top_k, width=width, experts=content[start:end]
        )
        found.append(RoutedExperts.unpack(part))
        start = end
    if start != len(content):
        raise DataError(
            f"trajectory payload is inconsistent: {len(content)} bytes of routed experts, {start} are "
            "announced"
        )
    return found
