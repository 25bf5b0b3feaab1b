"""Prompts that became too easy."""

from __future__ import annotations

import pytest

from trainer.algorithms.curriculum import easy_prompts

ACTIVE = ["a", "b", "c", "d", "e"]
SCORES = {"a": 0.9, "b": 0.5, "c": 1.0, "d": 0.9, "gone": 1.0}


@pytest.mark.parametrize(
    ("max_share", "expected"),
    [(1.0, ["c", "a", "d"]), (0.5, ["c", "a"]), (0.2, ["c"]), (0.19, []), (0.0, [])],
)
def test_the_highest_scores_above_the_threshold_go_first(max_share, expected):
    assert easy_prompts(ACTIVE, SCORES, threshold=0.5, max_share=max_share) == expected


def test_a_score_at_the_threshold_stays():
    assert easy_prompts(ACTIVE, SCORES, threshold=1.0, max_share=1.0) == []
