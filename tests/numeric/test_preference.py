"""Losses of pairs on packed sequences, and distillation, against slow float64 loops."""

from __future__ import annotations

import math

import pytest
import torch

from tests.numeric.packed import LENGTHS, actions, random_batch, segments_of, spans
from trainer.algorithms.distillation import distillation_advantages
from trainer.algorithms.preference import (
    bradley_terry_loss,
    dpo_loss,
    exo_pair_loss,
    hinge_loss,
    ipo_loss,
    pair_margins,
    sequence_gains,
    sequence_scores,
)

BETA = 0.3


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def slow_exo(x: float, smoothing: float) -> float:
    """KL of two distributions over which answer of a pair is the better one."""
    right, wrong = math.exp(log_sigmoid(x)), math.exp(log_sigmoid(-x))
    return right * math.log(right / (1 - smoothing)) + wrong * math.log(wrong / smoothing)


def slow_margins(batch) -> list[float]:
    gains = [
        math.fsum((batch["logprobs"][t] - batch["reference_logprobs"][t]).item() for t in rows)
        for rows in actions(batch)
    ]
    return [gains[i] - gains[i + 1] for i in range(0, len(gains), 2)]


def margins_of(batch, logprobs=None) -> torch.Tensor:
    logprobs = batch["logprobs"] if logprobs is None else logprobs
    return pair_margins(
        sequence_gains(
            logprobs, batch["reference_logprobs"], batch["loss_mask"], segments_of(batch)
        )
    )


def test_hinge_and_exo_by_hand():
    """A margin of 2 at beta 0.3 lacks 0.4; at a margin of 0, KL((1/2, 1/2) || (0.9, 0.1)) is 0.5108."""
    assert hinge_loss(torch.tensor([2.0, 9.0]), 0.3).item() == pytest.approx(0.2)
    got = exo_pair_loss(torch.zeros(1), 0.3, 0.1)
    assert got.item() == pytest.approx(math.log(0.5 / 0.3), abs=1e-6)


def test_exo_is_least_where_the_policy_prefers_as_the_label_says():
    margins = torch.linspace(-20.0, 20.0, 4001, dtype=torch.float64)
    losses = torch.stack([exo_pair_loss(m[None], 0.3, 0.1) for m in margins])
    assert margins[losses.argmin()].item() == pytest.approx(math.log(9.0) / 0.3, abs=0.02)
    assert losses.min().item() == pytest.approx(0.0, abs=1e-6)


LOSSES = {
    "dpo": (
        lambda m: dpo_loss(m, BETA),
        lambda h: -log_sigmoid(BETA * h),
    ),
    "smoothed": (
        lambda m: dpo_loss(m, BETA, 0.1),
        lambda h: -0.9 * log_sigmoid(BETA * h) - 0.1 * log_sigmoid(-BETA * h),
    ),
    "ipo": (
        lambda m: ipo_loss(m, BETA),
        lambda h: (h - 1 / (2 * BETA)) ** 2,
    ),
    "hinge": (
        lambda m: hinge_loss(m, BETA),
        lambda h: max(0.0, 1 - BETA * h),
    ),
    "exo_pair": (
        lambda m: exo_pair_loss(m, BETA, 0.1),
        lambda h: slow_exo(BETA * h, 0.1),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_preference_losses_equal_the_slow_loop(name, seed):
    batch = random_batch(seed)
    fast, slow = LOSSES[name]
    expected = [slow(h) for h in slow_margins(batch)]
    assert fast(margins_of(batch)).item() == pytest.approx(sum(expected) / 3, rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_their_gradients_equal_differences(name):
    batch = random_batch(0)
    fast, _ = LOSSES[name]
    logprobs = batch["logprobs"].clone().requires_grad_()
    fast(margins_of(batch, logprobs)).backward()
    for t in range(batch.num_tokens):
        moved = torch.zeros_like(batch["logprobs"])
        moved[t] = 1e-6
        up = fast(margins_of(batch, batch["logprobs"] + moved))
        down = fast(margins_of(batch, batch["logprobs"] - moved))
        assert logprobs.grad[t].item() == pytest.approx(((up - down) / 2e-6).item(), abs=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_whole_pairs_in_micro_batches_give_the_same_mean(name):
    batch = random_batch(2)
    fast, _ = LOSSES[name]
    parts = [fast(margins_of(batch.select(pair))).item() for pair in ([4, 5], [0, 1], [2, 3])]
    assert sum(parts) / 3 == pytest.approx(fast(margins_of(batch)).item(), rel=1e-12)


def test_a_sequence_without_its_partner_is_refused():
    with pytest.raises(ValueError, match="pairs"):
        pair_margins(torch.zeros(3))


@pytest.mark.parametrize("wanted", [None, torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)])
def test_a_reward_model_learns_from_the_scores_at_the_last_rows(wanted):
    batch = random_batch(0)
    scores = [batch["advantages"][rows[-1]].item() for rows in spans(LENGTHS)]
    got = sequence_scores(batch["advantages"], segments_of(batch))
    assert got.tolist() == scores
    asked = [0.0] * 3 if wanted is None else wanted.tolist()
    expected = [-log_sigmoid(scores[2 * i] - scores[2 * i + 1] - asked[i]) for i in range(3)]
    loss = bradley_terry_loss(pair_margins(got), wanted)
    assert loss.item() == pytest.approx(sum(expected) / 3, rel=1e-12)


def test_distillation_advantages_are_the_gap_to_the_teacher_without_gradient():
    logprobs = torch.tensor([-1.0, -3.0]).requires_grad_()
    got = distillation_advantages(logprobs, torch.tensor([-2.0, -1.0]))
    assert got.tolist() == [-1.0, 2.0]
    assert not got.requires_grad
