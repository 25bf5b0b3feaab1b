"""Metrics of the distance between two policies."""

from __future__ import annotations

import math

import pytest
import torch

from tests.numeric.packed import actions, random_batch
from trainer.algorithms.diagnostics import Mismatch


def mismatch_of(batch) -> Mismatch:
    names = ("proximal_logprobs", "behaviour_logprobs", "loss_mask")
    return Mismatch.of(*(batch[name] for name in names))


def test_figures_equal_the_slow_loop():
    batch = random_batch(0)
    gaps = batch["proximal_logprobs"] - batch["behaviour_logprobs"]
    inside = [gaps[t].item() for rows in actions(batch) for t in rows]
    weights = [math.exp(gap) for gap in inside]
    got = mismatch_of(batch)
    size = len(inside)
    assert got.mean_distance == pytest.approx(math.fsum(map(abs, inside)) / size)
    assert got.max_distance == pytest.approx(max(map(abs, inside)))
    k3 = math.fsum(w - 1 - gap for w, gap in zip(weights, inside, strict=True))
    assert got.kl == pytest.approx(k3 / size)
    share = math.fsum(weights) ** 2 / math.fsum(w * w for w in weights) / size
    assert got.effective_sample_size == pytest.approx(share)


def test_on_policy_nothing_is_lost_and_of_nothing_as_well():
    logprobs = torch.randn(5)
    same = Mismatch.of(logprobs, logprobs, torch.ones(5, dtype=torch.bool))
    nothing = Mismatch.of(logprobs, logprobs, torch.zeros(5, dtype=torch.bool))
    for got in (same, nothing):
        assert (got.mean_distance, got.kl, got.max_distance) == (0.0, 0.0, 0.0)
        assert got.effective_sample_size == 1.0


def test_one_token_of_a_huge_weight_is_worth_one():
    gaps = torch.zeros(100)
    gaps[0] = 15.0
    got = Mismatch.of(gaps, torch.zeros(100), torch.ones(100, dtype=torch.bool))
    assert got.effective_sample_size == pytest.approx(0.01, rel=1e-3)
