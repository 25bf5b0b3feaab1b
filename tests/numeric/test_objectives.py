"""Objectives of single tokens against their formulas, and their gradients against differences."""

from __future__ import annotations

import math

import pytest
import torch

from tests.numeric.packed import random_batch, segments_of, spans
from trainer.algorithms.objectives import cispo_objective, clipped_objective, sapo_objective
from trainer.algorithms.ratios import at_level, bounded_exp, log_ratios
from trainer.algorithms.segments import Segments

LOW, HIGH, DUAL = 0.2, 0.28, 3.0
STEP = 1e-6


def sign_table() -> tuple[torch.Tensor, torch.Tensor]:
    """Every ratio of interest with both signs."""
    ratios = [0.1, 0.79, 0.8, 1.0, 1.28, 1.3, 2.9, 3.1, 50.0]
    pairs = [(r, a) for r in ratios for a in (-2.0, 0.0, 0.5)]
    ratio, advantages = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    return ratio, advantages


def slow_clip(r: float, a: float, dual: float | None) -> float:
    loss = max(-r * a, -min(max(r, 1 - LOW), 1 + HIGH) * a)
    if dual is not None and a < 0:
        loss = min(loss, dual * abs(a))
    return -loss


@pytest.mark.parametrize("dual", [None, DUAL])
def test_clipped_objective_equals_its_formula(dual):
    ratio, advantages = sign_table()
    got, is_clipped = clipped_objective(ratio, advantages, LOW, HIGH, dual)
    expected = [
        slow_clip(r, a, dual) for r, a in zip(ratio.tolist(), advantages.tolist(), strict=True)
    ]
    assert got.tolist() == pytest.approx(expected, rel=1e-12)
    assert is_clipped.tolist() == [
        r * a != e for r, a, e in zip(ratio.tolist(), advantages.tolist(), expected, strict=True)
    ]


def test_without_a_higher_range_the_clip_is_symmetric():
    got, _ = clipped_objective(torch.tensor([9.0, 0.0]), torch.tensor([1.0, -1.0]), 0.2)
    assert got.tolist() == pytest.approx([1.2, -0.8])


@pytest.mark.parametrize("dual", [None, DUAL])
def test_a_clipped_token_has_no_gradient_and_any_other_has_its_advantage(dual):
    ratio, advantages = sign_table()
    ratio.requires_grad_()
    got, is_clipped = clipped_objective(ratio, advantages, LOW, HIGH, dual)
    got.sum().backward()
    is_edge = (ratio == 0.8) | (ratio == 1.28)
    expected = torch.where(is_clipped, 0.0, advantages)
    torch.testing.assert_close(ratio.grad[~is_edge], expected[~is_edge])


def test_cispo_weighs_the_gradient_by_the_clipped_ratio():
    ratio, advantages = sign_table()
    logprobs = ratio.log().requires_grad_()
    got, is_clipped = cispo_objective(logprobs.exp(), logprobs, advantages, LOW, HIGH)
    got.sum().backward()
    clipped = ratio.clamp(1 - LOW, 1 + HIGH)
    torch.testing.assert_close(logprobs.grad, clipped * advantages)  # no token loses its gradient
    torch.testing.assert_close(got.detach(), clipped * advantages * ratio.log())
    assert bool(is_clipped[ratio == 50.0].all()) and not bool(is_clipped[ratio == 1.0].any())


def test_sapo_equals_its_formula_and_has_slope_a_where_the_policies_agree():
    ratio, advantages = sign_table()
    ratio.requires_grad_()
    got = sapo_objective(ratio, advantages, 1.0, 1.05)
    got.sum().backward()
    for r, a, value in zip(ratio.tolist(), advantages.tolist(), got.tolist(), strict=True):
        tau = 1.0 if a > 0 else 1.05
        assert value == pytest.approx(4 / tau / (1 + math.exp(-tau * (r - 1))) * a, rel=1e-9)
    at_one = ratio == 1.0
    torch.testing.assert_close(ratio.grad[at_one], advantages[at_one])


@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
@pytest.mark.parametrize("seed", range(3))
def test_ratios_of_sequences_equal_the_slow_loop(level, seed):
    batch = random_batch(seed)
    mask = batch["loss_mask"]
    logs = log_ratios(batch["logprobs"], batch["proximal_logprobs"], mask)
    expected = [0.0] * batch.num_tokens
    for rows in spans(batch.lengths):
        inside = [t for t in rows if mask[t]]
        gaps = [(batch["logprobs"][t] - batch["proximal_logprobs"][t]).item() for t in inside]
        for t, gap in zip(inside, gaps, strict=True):
            whole = math.fsum(gaps) / (len(gaps) if level == "geometric" else 1)
            expected[t] = gap if level == "token" else whole
    got = at_level(logs, mask, segments_of(batch), level)
    assert got.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_gradient_of_a_sequence_ratio_equals_differences():
    start = torch.tensor([0.1, -0.2, 0.4, 0.3], dtype=torch.float64)
    mask = torch.tensor([True, False, True, True])
    sequences = Segments.of_lengths([3, 1])
    weights = torch.tensor([1.0, 5.0, 2.0, 3.0], dtype=torch.float64)

    def value(x: torch.Tensor) -> torch.Tensor:
        logs = log_ratios(x, torch.zeros(4, dtype=torch.float64), mask)
        return (weights * bounded_exp(at_level(logs, mask, sequences, "geometric")))[mask].sum()

    logs = start.clone().requires_grad_()
    value(logs).backward()
    for t in range(4):
        moved = torch.zeros(4, dtype=torch.float64)
        moved[t] = STEP
        slope = (value(start + moved) - value(start - moved)) / (2 * STEP)
        assert logs.grad[t].item() == pytest.approx(slope.item(), abs=1e-8)


def test_a_huge_ratio_stays_finite():
    assert torch.isfinite(bounded_exp(torch.tensor([-1e30, 1e30, math.inf]))).all()
