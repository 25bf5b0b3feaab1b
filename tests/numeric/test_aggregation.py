"""From tokens to one number, whatever the split into micro-batches."""

from __future__ import annotations

import math

import pytest
import torch

from tests.numeric.packed import actions, random_batch, segments_of
from trainer.algorithms.aggregation import aggregate, aggregation_weight, masked_mean
from trainer.batching.sequences import SequenceBatch

MODES = (
    "token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum_norm",
)
MAX_TOKENS = 12


def slow_aggregate(values: list[float], rows: list[list[int]], mode: str) -> float:
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    sums = [math.fsum(values[t] for t in row) for row in rows]
    if mode == "token_mean":
        return math.fsum(sums) / sum(len(row) for row in rows)
    if mode == "sequence_mean_token_mean":
        sums = [total / len(row) for total, row in zip(sums, rows, strict=True)]
    if mode == "sequence_mean_token_sum_norm":
        sums = [total / MAX_TOKENS for total in sums]
    return math.fsum(sums) / len(rows)


def fast(batch: SequenceBatch, mode: str, values: torch.Tensor | None = None) -> torch.Tensor:
    values = batch["advantages"] if values is None else values
    limit = MAX_TOKENS if mode.endswith("norm") else None
    return aggregate(values, batch["loss_mask"], segments_of(batch), mode, limit)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
def test_it_equals_the_slow_loop(mode, seed):
    batch = random_batch(seed)
    expected = slow_aggregate(batch["advantages"].tolist(), actions(batch), mode)
    assert fast(batch, mode).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [[[0, 1, 2], [3, 4, 5]], [[5], [0, 3], [1], [4, 2]]])
def test_the_mean_over_micro_batches_by_their_weight_is_that_of_the_whole(mode, seed, cut):
    batch = random_batch(seed)
    total = weights = 0.0
    for indices in cut:
        part = batch.select(indices)
        weight = aggregation_weight(part["loss_mask"], segments_of(part), mode)
        total += weight * fast(part, mode).item()
        weights += weight
    assert total / weights == pytest.approx(fast(batch, mode).item(), rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nothing_outside_of_the_mask_reaches_value_or_gradient(mode, value):
    batch = random_batch(2)
    mask = batch["loss_mask"]
    values = torch.where(mask, batch["advantages"], value).requires_grad_()
    loss = fast(batch, mode, values)
    loss.backward()
    assert loss.item() == pytest.approx(fast(batch, mode).item(), rel=1e-12)
    assert torch.isfinite(values.grad).all()
    assert not values.grad[~mask].any()


@pytest.mark.parametrize("mode", MODES)
def test_of_nothing_it_is_zero(mode):
    batch = random_batch(1).with_columns(loss_mask=torch.zeros(29, dtype=torch.bool))
    assert fast(batch, mode).item() == 0.0
    assert aggregation_weight(batch["loss_mask"], segments_of(batch), mode) == 0.0
    assert masked_mean(torch.tensor([math.inf, 1.0]), torch.tensor([False, False])).item() == 0.0


def test_a_norm_without_its_constant_is_refused():
    batch = random_batch(0)
    with pytest.raises(ValueError, match="max_tokens"):
        aggregate(
            batch["advantages"],
            batch["loss_mask"],
            segments_of(batch),
            "sequence_mean_token_sum_norm",
        )


@pytest.mark.parametrize("mode", MODES)
def test_float32_is_summed_in_float64(mode):
    batch = random_batch(0)
    rounded = batch["advantages"].float()
    got = fast(batch, mode, rounded)
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(fast(batch, mode, rounded.double()).item(), rel=1e-15)
    assert got.item() == pytest.approx(fast(batch, mode).item(), rel=1e-5)
