"""Centring and scaling at every level against a slow float64 loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithms.masked_statistics import MaskedStatistics
from trainer.algorithms.normalization import normalize
from trainer.algorithms.segments import Segments

LEVELS = ("batch", "group", None)
EPS = 1e-5


def slow_normalize(values, counts, groups, center, scale, leave_one_out, unbiased) -> list[float]:
    def peers(at: int, level: str) -> list[int]:
        return [
            i for i, c in enumerate(counts) if c and (level == "batch" or groups[i] == groups[at])
        ]

    result = []
    for at, value in enumerate(values):
        if center is not None:
            chosen = [values[i] for i in peers(at, center)]
            total, size = math.fsum(chosen), len(chosen)
            if leave_one_out:
                mean = (total - values[at]) / (size - 1) if size > 1 else values[at]
            else:
                mean = total / max(size, 1)
            value = value - mean
        if scale is not None:
            chosen = [values[i] for i in peers(at, scale)]
            mean = math.fsum(chosen) / max(len(chosen), 1)
            squares = math.fsum((x - mean) ** 2 for x in chosen)
            if unbiased:
                variance = squares / (len(chosen) - 1) if len(chosen) > 1 else 1.0
            else:
                variance = squares / max(len(chosen), 1)
            value = value / (math.sqrt(variance) + EPS)
        result.append(value)
    return result


rows = st.lists(
    st.tuples(st.floats(-20, 20, width=32), st.integers(0, 3), st.booleans()),
    min_size=1,
    max_size=16,
)


@settings(max_examples=60, deadline=None)
@given(rows, st.sampled_from(LEVELS), st.sampled_from(LEVELS), st.booleans(), st.booleans())
def test_every_level_equals_the_slow_loop(rows, center, scale, leave_one_out, unbiased):
    values, groups, counts = (list(column) for column in zip(*rows, strict=True))
    got = normalize(
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(counts),
        Segments.of_names(torch.tensor(groups)),
        center,
        scale,
        leave_one_out,
        unbiased,
    )
    expected = slow_normalize(values, counts, groups, center, scale, leave_one_out, unbiased)
    # Where all values are (almost) equal, both divide rounding errors by eps.
    assert got.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    if scale is None:
        assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("center", LEVELS)
@pytest.mark.parametrize("scale", LEVELS)
@pytest.mark.parametrize("unbiased", [True, False])
def test_ordinary_values_agree_closely(center, scale, unbiased):
    generator = torch.Generator().manual_seed(3)
    values = 5 + 3 * torch.randn(40, generator=generator, dtype=torch.float64)
    groups = torch.randint(4, (40,), generator=generator)
    counts = torch.rand(40, generator=generator) < 0.7
    got = normalize(values, counts, Segments.of_names(groups), center, scale, False, unbiased)
    expected = slow_normalize(
        values.tolist(), counts.tolist(), groups.tolist(), center, scale, False, unbiased
    )
    assert got.tolist() == pytest.approx(expected, rel=1e-9)


def test_groups_of_unequal_size_in_any_order_are_not_mixed():
    """A fixed stride of 2 would take the neighbours (1, 10), (2, 20), (3, 30) for siblings."""
    values = torch.tensor([1.0, 10.0, 2.0, 20.0, 3.0, 30.0])
    groups = Segments.of_names(torch.tensor([7, -1, 7, -1, 7, -1]))
    got = normalize(values, torch.ones(6, dtype=torch.bool), groups, "group", None)
    assert got.tolist() == [-1.0, -10.0, 0.0, 0.0, 1.0, 10.0]


def test_leave_one_out_by_hand():
    values = torch.tensor([1.0, 2.0, 6.0])
    groups = Segments.whole(values)
    got = normalize(values, torch.ones(3, dtype=torch.bool), groups, "group", None, True)
    assert got.tolist() == [1.0 - 4.0, 2.0 - 3.5, 6.0 - 1.5]


def test_a_value_alone_is_no_different_from_itself():
    value = torch.tensor([3.0])
    one = torch.ones(1, dtype=torch.bool)
    for leave_one_out in (True, False):
        got = normalize(value, one, Segments.whole(value), "group", None, leave_one_out)
        assert got.tolist() == [0.0]


def test_the_spread_of_the_batch_is_around_the_mean_of_the_batch():
    """Around the groups' means it would be 1."""
    values = torch.tensor([0.0, 2.0, 10.0, 12.0], dtype=torch.float64)
    groups = Segments.of_names(torch.tensor([0, 0, 1, 1]))
    got = normalize(values, torch.ones(4, dtype=torch.bool), groups, "group", "batch", eps=0.0)
    assert got.tolist() == pytest.approx([-1 / math.sqrt(26), 1 / math.sqrt(26)] * 2)


def test_values_that_do_not_count_may_be_anything():
    values = torch.tensor([1.0, math.nan, 3.0, math.inf])
    counts = torch.tensor([True, False, True, False])
    got = normalize(values, counts, Segments.whole(values), "batch", "group", unbiased=True)
    assert got[counts].tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], rel=1e-4)


def test_masked_statistics_by_hand():
    statistics = MaskedStatistics.of(
        torch.tensor([1.0, 3.0, math.nan]), torch.tensor([True, True, False])
    )
    assert (statistics.mean, statistics.variance) == (2.0, 1.0)
    nothing = MaskedStatistics.of(torch.tensor([1.0]), torch.tensor([False]))
    assert (nothing.mean, nothing.variance) == (0.0, 0.0)
