"""Curriculum: prompts that have become too easy are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def easy_prompts(
    active: Sequence[str], scores: Mapping[str, float], threshold: float, max_share: float
) -> list[str]:
    """The prompts to leave out from the next epoch on.

    Args:
        active: ids of the active prompts.
        scores: mean score of each prompt's last group; a prompt without one stays.
        threshold: a prompt goes if its score is above this.
        max_share: at most this share of `active` goes, rounded down; the highest first, the earlier among
            equals.
    """
    above = [name for name in active if name in scores and scores[name] > threshold]
    above.sort(key=lambda name: -scores[name])
    return above[: int(len(active) * max_share)]
