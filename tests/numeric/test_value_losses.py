"""The critic's loss, its running statistics, and what it explains."""

from __future__ import annotations

import math

import pytest
import torch

from headway.contracts.config.critic import CriticConfig
from tests.numeric.packed import actions, random_batch
from tests.numeric.policies import ALONE
from trainer.algorithms.masked_statistics import MaskedStatistics
from trainer.algorithms.values import ValueNormalizer, explained_variance, value_losses
from trainer.api import MicroBatchSpec
from trainer.interfaces.ppo_critic import PPOCritic

EPS = 0.5


def columns() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    values, old, returns = 2 * torch.randn(3, 50, generator=generator, dtype=torch.float64)
    return values, old, returns


def slow_loss(v: float, old: float, target: float, delta: float | None) -> float:
    def error(x: float) -> float:
        gap = abs(x - target)
        if delta is None or gap <= delta:
            return gap**2 / 2
        return delta * (gap - delta / 2)

    moved = old + min(max(v - old, -EPS), EPS)
    return max(error(v), error(moved))


@pytest.mark.parametrize("delta", [None, 1.0, 10.0])
def test_value_losses_equal_the_slow_loop(delta):
    values, old, returns = columns()
    got, is_clipped = value_losses(values, old, returns, EPS, delta)
    rows = list(zip(values.tolist(), old.tolist(), returns.tolist(), strict=True))
    assert got.tolist() == pytest.approx([slow_loss(*row, delta) for row in rows], rel=1e-12)
    plain, _ = value_losses(values, old, returns, None, delta)
    assert is_clipped.tolist() == (got > plain).tolist()


def test_no_rounding_makes_a_value_within_the_range_look_clipped():
    generator = torch.Generator().manual_seed(6)
    old, returns = 2 * torch.randn(2, 1000, generator=generator)
    values = old + EPS * (2 * torch.rand(1000, generator=generator) - 1) * 0.999
    values.requires_grad_()
    losses, is_clipped = value_losses(values, old, returns, EPS)
    losses.sum().backward()
    assert not is_clipped.any()
    torch.testing.assert_close(values.grad, values.detach() - returns)


def test_a_value_that_ran_too_far_from_the_old_one_is_not_pulled_further():
    """By hand: from 0 past the target 1 to 2. Clipped, it would still be at 0.5: error 0.5 < 1."""
    values = torch.tensor([2.0, 0.9, -2.0]).requires_grad_()
    got, is_clipped = value_losses(values, torch.zeros(3), torch.ones(3), EPS)
    got.sum().backward()
    assert got.tolist() == pytest.approx([0.5, 0.125, 4.5])
    assert is_clipped.tolist() == [False, True, False]
    # Too far: back with full force. On its way, but too fast: no gradient. Wrong way: back as well.
    assert values.grad.tolist() == pytest.approx([1.0, 0.0, -3.0])


def test_explained_variance_by_hand():
    returns = torch.tensor([1.0, 2.0, 3.0, 99.0])
    mask = torch.tensor([True, True, True, False])

    def explained(values: list[float]) -> float:
        errors = MaskedStatistics.of(returns - torch.tensor(values), mask)
        return explained_variance(errors, MaskedStatistics.of(returns, mask))

    assert explained([1.0, 2.0, 3.0, 0.0]) == pytest.approx(1.0)
    assert explained([5.0, 5.0, 5.0, 0.0]) == pytest.approx(0.0)
    assert explained([3.0, 2.0, 1.0, 0.0]) == pytest.approx(-3.0)
    constant = MaskedStatistics.of(torch.ones(4), mask)
    assert math.isnan(explained_variance(constant, constant))


@pytest.mark.parametrize("decay", [None, 0.9])
def test_running_statistics_equal_the_slow_loop(decay):
    generator = torch.Generator().manual_seed(1)
    normalizer = ValueNormalizer(decay)
    seen: list[list[float]] = []
    for _ in range(6):
        batch = 3 + 2 * torch.randn(8, generator=generator, dtype=torch.float64)
        mask = torch.rand(8, generator=generator) < 0.7
        normalizer.update(MaskedStatistics.of(batch, mask))
        seen.append(batch[mask].tolist())
        if decay is None:
            values = [x for chunk in seen for x in chunk]
            weights = [1.0 / len(values)] * len(values)
        else:
            ages = range(len(seen) - 1, -1, -1)
            raw = [decay**age for age in ages]
            values = [x for chunk in seen for x in chunk]
            weights = [
                w / math.fsum(raw) / len(chunk)
                for w, chunk in zip(raw, seen, strict=True)
                for _ in chunk
            ]
        mean = math.fsum(w * x for w, x in zip(weights, values, strict=True))
        square = math.fsum(w * x * x for w, x in zip(weights, values, strict=True))
        assert normalizer.mean == pytest.approx(mean, rel=1e-9)
        assert normalizer.std == pytest.approx(math.sqrt(square - mean**2), rel=1e-9)


def test_targets_are_bounded_and_values_come_back():
    normalizer = ValueNormalizer(None)
    normalizer.update(MaskedStatistics.of(torch.tensor([1.0, 3.0]), torch.tensor([True, True])))
    assert normalizer.normalize(torch.tensor([1.0, 3.0, 100.0])).tolist() == [-1.0, 1.0, 5.0]
    assert normalizer.denormalize(torch.tensor([-1.0, 0.0])).tolist() == [1.0, 2.0]


def test_before_any_data_it_is_the_identity_and_equal_returns_keep_a_spread():
    normalizer = ValueNormalizer()
    assert normalizer.denormalize(torch.tensor([0.7])).tolist() == pytest.approx([0.7])
    normalizer.update(MaskedStatistics.of(torch.tensor([1.0]), torch.tensor([False])))
    assert normalizer.std == 1.0
    normalizer.update(MaskedStatistics.of(torch.full((4,), 2.0), torch.ones(4, dtype=torch.bool)))
    assert normalizer.mean == pytest.approx(2.0)  # debiased from the first update on
    assert normalizer.std == pytest.approx(0.1)


def test_a_normalizer_goes_on_from_a_checkpoint():
    generator = torch.Generator().manual_seed(2)
    batches = [
        MaskedStatistics.of(torch.randn(5, generator=generator), torch.ones(5) > 0)
        for _ in range(3)
    ]
    first, second = ValueNormalizer(0.9), ValueNormalizer(0.9)
    first.update(batches[0])
    second.load_state_dict(first.state_dict())
    for batch in batches[1:]:
        first.update(batch)
        second.update(batch)
    assert first == second


class Said:
    """What a critic's engine hands to its loss."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def values(self) -> torch.Tensor:
        return self._values


def slow_aggregate(mode: str, sequences: list[list[float]]) -> float:
    sums = [math.fsum(losses) for losses in sequences]
    if mode == "token_mean":
        return math.fsum(sums) / sum(len(losses) for losses in sequences)
    sizes = [len(losses) if mode == "sequence_mean_token_mean" else 1 for losses in sequences]
    return math.fsum(s / n for s, n in zip(sums, sizes, strict=True)) / len(sequences)


@pytest.mark.parametrize(
    "mode", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"]
)
def test_a_critics_loss_is_aggregated_as_configured_however_a_batch_is_cut(mode):
    critic = PPOCritic(
        None, ALONE, CriticConfig(aggregation=mode, eps_clip=EPS), MicroBatchSpec(100)
    )
    batch = random_batch(3)
    batch = batch.with_columns(
        normalized_values=batch["proximal_logprobs"], targets=batch["advantages"]
    )

    def loss_of(part):
        return critic._loss(Said(part["logprobs"]), part).loss.item()

    names = ("logprobs", "normalized_values", "targets")
    v, old, target = (batch[name].tolist() for name in names)
    per_sequence = [
        [slow_loss(v[t], old[t], target[t], None) for t in rows] for rows in actions(batch) if rows
    ]
    whole = slow_aggregate(mode, per_sequence)
    assert loss_of(batch) == pytest.approx(whole, rel=1e-10)
    parts = [batch.select(indices) for indices in ([3], [5, 1], [0, 2, 4])]
    weights = [critic._weight(part) for part in parts]
    sums = math.fsum(w * loss_of(part) for w, part in zip(weights, parts, strict=True))
    assert sums / sum(weights) == pytest.approx(whole, rel=1e-10)
    assert sum(weights) == critic._weight(batch)
