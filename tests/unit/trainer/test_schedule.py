"""The learning rate over the versions of a run."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from headway.contracts.config.optimizer import OptimizerConfig
from trainer.backends.schedule import lr_factor


def factors(steps, total=10, **config):
    factor = lr_factor(OptimizerConfig(**config), total)
    return [factor(step) for step in steps]


def test_constant_stays_at_the_peak():
    assert factors([0, 1, 10, 99]) == [1.0] * 4


def test_warm_up_rises_in_equal_steps_and_ends_at_the_peak():
    assert factors(range(6), warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_the_floor_and_stays_there():
    got = factors([0, 5, 10, 20], schedule="linear", min_lr_ratio=0.2)
    assert got == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_cosine_is_half_way_in_the_middle():
    got = factors([0, 2, 5, 10, 11], schedule="cosine", min_lr_ratio=0.1)
    quarter = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.2))
    assert got == pytest.approx([1.0, quarter, 0.55, 0.1, 0.1])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_fall_begins_after_the_warm_up(schedule):
    got = factors(range(11), warmup_steps=4, schedule=schedule)
    assert got[3] == got[4] == 1.0
    assert all(a > b for a, b in pairwise(got[4:]))
    assert got[10] == pytest.approx(0.0)


def test_a_run_shorter_than_its_warm_up_has_a_schedule_too():
    got = factors(range(4), total=2, warmup_steps=4, schedule="linear")
    assert got == [0.25, 0.5, 0.75, 1.0]
