"""Weights, rejection and the proximal approximation against slow float64 loops."""

from __future__ import annotations

import math

import pytest
import torch

from tests.numeric.packed import actions, random_batch, segments_of
from trainer.algorithms.importance_weights import (
    accepted,
    behaviour_weights,
    interpolated_proximal,
    proximal_shares,
    within_second_moment,
)
from trainer.algorithms.ratios import log_ratios


def gaps_of(batch) -> list[float]:
    gaps = batch["proximal_logprobs"] - batch["behaviour_logprobs"]
    return gaps.tolist()


def log_weight_of(batch) -> torch.Tensor:
    return log_ratios(batch["proximal_logprobs"], batch["behaviour_logprobs"], batch["loss_mask"])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
@pytest.mark.parametrize("bounds", [(None, None), (None, 1.2), (0.8, None), (0.8, 1.2)])
@pytest.mark.parametrize("action", ["mask", "clamp"])
def test_bounded_weights_equal_the_slow_loop(seed, level, bounds, action):
    batch = random_batch(seed)
    gaps, (floor, cap) = gaps_of(batch), bounds
    weights, is_within = behaviour_weights(
        log_weight_of(batch), batch["loss_mask"], segments_of(batch), level, floor, cap, action
    )
    for rows in actions(batch):
        total = math.fsum(gaps[t] for t in rows)
        for t in rows:
            log = {"token": gaps[t], "sequence": total, "geometric": total / len(rows)}[level]
            weight = math.exp(log)
            is_low = floor is not None and weight < floor
            is_high = cap is not None and weight > cap
            if is_low or is_high:
                bound = floor if is_low else cap
                weight = bound if action == "clamp" else 0.0
            assert weights[t].item() == pytest.approx(weight, rel=1e-12)
            assert is_within[t].item() == (not is_low and not is_high)


METRICS = {
    "ratio": lambda g: g,  # reduced in log space
    "k1": lambda g: -g,
    "k2": lambda g: g * g / 2,
    "k3": lambda g: math.exp(g) - 1 - g,
}
STATISTICS = {"mean": lambda x: math.fsum(x) / len(x), "sum": math.fsum, "max": max}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("bounds", [(None, 1.1), (0.2, None), (0.1, 1.3)])
def test_acceptance_equals_the_slow_loop(seed, metric, level, statistic, bounds):
    batch = random_batch(seed)
    gaps, (lower, upper) = gaps_of(batch), bounds
    kept = accepted(
        log_weight_of(batch),
        batch["loss_mask"],
        segments_of(batch),
        metric,
        level,
        statistic,
        lower,
        upper,
    )
    for rows in actions(batch):
        for t in rows:
            seen = [METRICS[metric](gaps[i]) for i in (rows if level == "sequence" else [t])]
            value = STATISTICS[statistic](seen) if level == "sequence" else seen[0]
            value = math.exp(value) if metric == "ratio" else value
            expected = (lower is None or value >= lower) and (upper is None or value <= upper)
            assert kept[t].item() == expected


def slow_m2(gaps: list[float], threshold: float) -> set[int]:
    """Positions kept: the most, of the smallest squares, whose mean is below the threshold."""
    order = sorted(range(len(gaps)), key=lambda i: gaps[i] ** 2)
    for dropped in range(len(order)):
        rest = order[: len(order) - dropped]
        if math.fsum(gaps[i] ** 2 for i in rest) / len(rest) < threshold:
            return set(rest)
    return set(order[:1])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threshold", [1e-9, 0.04, 0.2, 10.0])
def test_the_second_moment_drops_the_fewest(seed, threshold):
    batch = random_batch(seed)
    inside = [t for rows in actions(batch) for t in rows]
    gaps = gaps_of(batch)
    kept = within_second_moment(log_weight_of(batch), batch["loss_mask"], threshold)
    expected = {inside[i] for i in slow_m2([gaps[t] for t in inside], threshold)}
    assert {t for t in inside if kept[t]} == expected
    assert kept[~batch["loss_mask"]].all()


def test_the_second_moment_of_nothing_drops_nothing():
    empty = torch.zeros(3, dtype=torch.bool)
    assert within_second_moment(torch.zeros(3), empty, 0.1).all()


def test_the_proximal_approximation_by_hand():
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    current = torch.tensor([-2.0, -2.0, -2.0, -math.inf, -2.0])
    versions = torch.tensor([5, 4, 1, 5, -1])
    got = interpolated_proximal(current, behaviour, proximal_shares(versions, version=5))
    # Ages 1, 2, 5; the fourth is fresh, the fifth of no known version.
    assert got.tolist() == pytest.approx([-1.0, -1.5, -1.8, -1.0, -1.0])


def test_the_proximal_approximation_never_passes_the_current_policy():
    shares = proximal_shares(torch.tensor([9, 6, 5, 0, -1]), version=5)
    assert shares.tolist() == pytest.approx([0.0, 0.0, 0.0, 5 / 6, 0.0])
    assert interpolated_proximal(torch.zeros(5), -torch.ones(5), shares).max() < 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_outside_of_the_mask_is_seen(value):
    batch = random_batch(1)
    mask, sequences = batch["loss_mask"], segments_of(batch)
    spoilt = torch.where(mask, batch["proximal_logprobs"], value)
    logs = log_ratios(spoilt, batch["behaviour_logprobs"], mask)
    clean = log_weight_of(batch)
    torch.testing.assert_close(logs, clean)
    assert torch.isfinite(behaviour_weights(logs, mask, sequences, "sequence")[0]).all()
    for statistic in STATISTICS:
        seen = [
            accepted(x, mask, sequences, "k3", "sequence", statistic, 0.0, 0.2)[mask]
            for x in (logs, clean)
        ]
        assert torch.equal(*seen)
