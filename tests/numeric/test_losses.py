"""Losses against slow float64 loops written from the formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.policy_losses import ClipLossConfig
from trainer.algorithms.logprobs import token_logprobs
from trainer.algorithms.losses import policy_loss, sft_loss
from trainer.batching.sequences import SequenceBatch

EPS = 0.2
STEP = 1e-6


def slow_decoupled_loss(
    logprobs: list[float],
    proximal: list[float],
    behaviour: list[float],
    advantages: list[float],
    mask: list[bool],
    low: float = EPS,
    high: float = EPS,
    cap: float | None = None,
) -> float:
    """-(prox / behav) · min(rA, clip(r)A), mean over the mask; above the cap the weight is 0."""
    total, count = 0.0, 0
    for lp, px, bh, advantage, is_in in zip(
        logprobs, proximal, behaviour, advantages, mask, strict=True
    ):
        if not is_in:
            continue
        count += 1
        weight = math.exp(px - bh)
        if cap is not None and weight > cap:
            continue
        ratio = math.exp(lp - px)
        clipped = min(max(ratio, 1.0 - low), 1.0 + high)
        total -= weight * min(ratio * advantage, clipped * advantage)
    return total / max(count, 1)


def columns(seed: int, size: int = 40) -> dict[str, torch.Tensor]:
    """Columns whose ratios fall inside and outside of the clip range, and weights around the cap."""
    torch.manual_seed(seed)
    behaviour = -torch.rand(size, dtype=torch.float64) * 4
    proximal = behaviour + torch.randn(size, dtype=torch.float64)
    return {
        "logprobs": proximal + 0.4 * torch.randn(size, dtype=torch.float64),
        "proximal": proximal,
        "behaviour": behaviour,
        "advantages": torch.randn(size, dtype=torch.float64),
        "mask": torch.rand(size) < 0.7,
    }


def outcome(c: dict[str, torch.Tensor], **options) -> tuple[torch.Tensor, dict]:
    config = AlgorithmConfig(
        policy_loss=ClipLossConfig(
            eps_clip=options.get("low", EPS), eps_clip_higher=options.get("high")
        ),
        behaviour_weight_cap=options.get("cap"),
    )
    names = {
        "proximal": "proximal_logprobs",
        "behaviour": "behaviour_logprobs",
        "mask": "loss_mask",
    }
    columns = {names.get(name, name): column for name, column in c.items()}
    return policy_loss(config, SequenceBatch((len(c["mask"]),), columns), c["logprobs"])


def fast(c: dict[str, torch.Tensor], **options) -> torch.Tensor:
    return outcome(c, **options)[0]


def slow(c: dict[str, torch.Tensor], **options) -> float:
    return slow_decoupled_loss(*(c[name].tolist() for name in c), **options)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("options", [{}, {"cap": 2.0}, {"low": 0.2, "high": 0.28, "cap": 5.0}])
def test_decoupled_loss_equals_the_slow_loop(seed, options):
    c = columns(seed)
    assert fast(c, **options).item() == pytest.approx(slow(c, **options), rel=1e-12)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_gradient_equals_finite_differences_of_the_slow_loop(cap):
    c = columns(7, size=25)
    logprobs = c["logprobs"].clone().requires_grad_()
    fast(c | {"logprobs": logprobs}, cap=cap).backward()
    for position in range(25):
        moved = torch.zeros(25, dtype=torch.float64)
        moved[position] = STEP
        up = slow(c | {"logprobs": c["logprobs"] + moved}, cap=cap)
        down = slow(c | {"logprobs": c["logprobs"] - moved}, cap=cap)
        assert logprobs.grad[position].item() == pytest.approx(
            (up - down) / (2 * STEP), rel=1e-5, abs=1e-9
        )


def test_four_tokens_by_hand():
    ln = math.log
    c = {
        # ratios 1.5 (clipped to 1.2), 0.5 with A < 0 (clipped to 0.8), 1.0, 1.0 outside the mask
        "logprobs": torch.tensor([ln(0.6), ln(0.1), ln(0.3), ln(0.9)]),
        "proximal": torch.tensor([ln(0.4), ln(0.2), ln(0.3), ln(0.9)]),
        # weights 2, 1, 6 (above the cap of 5)
        "behaviour": torch.tensor([ln(0.2), ln(0.2), ln(0.05), ln(0.9)]),
        "advantages": torch.tensor([1.0, -1.0, 3.0, 100.0]),
        "mask": torch.tensor([True, True, True, False]),
    }
    loss, stats = outcome(c, cap=5.0)
    assert loss.item() == pytest.approx(-(2 * 1.2 - 1 * 0.8 + 0 * 3.0) / 3, rel=1e-6)
    assert stats["clip_fraction"].item() == pytest.approx(2 / 3)
    assert stats["capped_fraction"].item() == pytest.approx(1 / 3)
    assert stats["behaviour_weight"].item() == pytest.approx((2 + 1 + 6) / 3, rel=1e-6)
    k3 = sum(w - 1 - ln(w) for w in (2.0, 1.0, 6.0)) / 3
    assert stats["behaviour_kl"].item() == pytest.approx(k3, rel=1e-5)


def test_a_weight_at_the_cap_is_kept_and_the_denominator_never_shrinks():
    zeros = torch.zeros(2, dtype=torch.float64)
    behaviour = torch.tensor([-math.log(4.0), 0.0], dtype=torch.float64)
    weight = float((zeros - behaviour).exp()[0])
    ones = torch.ones(2, dtype=torch.float64)
    mask = torch.tensor([True, True])
    c = {"logprobs": zeros, "proximal": zeros, "behaviour": behaviour}
    c |= {"advantages": ones, "mask": mask}
    kept, above = fast(c, cap=weight), fast(c, cap=weight - 1e-9)
    assert kept.item() == pytest.approx(-(4 + 1) / 2)
    assert above.item() == pytest.approx(-(0 + 1) / 2)


def test_with_proximal_equal_to_behaviour_it_is_ppo():
    c = columns(3)
    c["proximal"] = c["behaviour"]
    ppo = [
        -min(math.exp(lp - b) * a, min(max(math.exp(lp - b), 0.8), 1.2) * a)
        for lp, b, a, m in zip(
            *(c[n].tolist() for n in ("logprobs", "behaviour", "advantages", "mask")), strict=True
        )
        if m
    ]
    assert fast(c, cap=1.0).item() == pytest.approx(sum(ppo) / len(ppo), rel=1e-12)


def test_on_policy_gradient_is_the_policy_gradient():
    c = columns(4)
    c["proximal"] = c["behaviour"] = c["logprobs"]
    logprobs = c["logprobs"].clone().requires_grad_()
    fast(c | {"logprobs": logprobs}).backward()
    expected = torch.where(c["mask"], -c["advantages"], 0.0) / c["mask"].sum()
    torch.testing.assert_close(logprobs.grad, expected)


@pytest.mark.parametrize("name", ["logprobs", "proximal", "behaviour"])
@pytest.mark.parametrize("value", [-math.inf, math.nan, 500.0, -500.0])
def test_nothing_outside_the_mask_reaches_loss_or_gradient(name, value):
    c = columns(5)
    clean = c["logprobs"].clone().requires_grad_()
    expected = fast(c | {"logprobs": clean})
    expected.backward()
    spoilt = c | {name: torch.where(c["mask"], c[name], value)}
    logprobs = spoilt["logprobs"].clone().requires_grad_()
    loss = fast(spoilt | {"logprobs": logprobs})
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logprobs.grad, clean.grad)


def test_an_empty_mask_gives_zero_and_no_gradient():
    c = columns(6)
    logprobs = c["logprobs"].clone().requires_grad_()
    loss = fast(c | {"logprobs": logprobs, "mask": torch.zeros(40, dtype=torch.bool)})
    loss.backward()
    assert loss.item() == 0.0
    assert not logprobs.grad.any()


finite = st.floats(-3.0, 3.0)
token = st.tuples(finite, finite, finite, finite, st.booleans())


@settings(max_examples=100, deadline=None)
@given(st.lists(token, min_size=1, max_size=12), st.sampled_from([None, 0.5, 1.0, 5.0]))
def test_decoupled_loss_equals_the_slow_loop_on_any_tokens(tokens, cap):
    lp, px, bh, advantages, mask = (list(column) for column in zip(*tokens, strict=True))
    tensors = [torch.tensor(column, dtype=torch.float64) for column in (lp, px, bh, advantages)]
    weights = (tensors[1] - tensors[2]).exp()
    if cap is not None and bool(((weights - cap).abs() < 1e-9).any()):
        return  # on the edge, rounding decides
    names = ("logprobs", "proximal", "behaviour", "advantages")
    c = dict(zip(names, tensors, strict=True)) | {"mask": torch.tensor(mask)}
    loss = fast(c, cap=cap)
    expected = slow_decoupled_loss(lp, px, bh, advantages, mask, cap=cap)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_sft_loss_is_the_mean_negative_logprob_of_the_completion():
    torch.manual_seed(0)
    logits = torch.randn(9, 11)
    labels = torch.randint(11, (9,))
    mask = torch.tensor([False, True, True, False, True, True, False, False, True])
    total = 0.0
    for row, label, is_in in zip(logits.tolist(), labels.tolist(), mask.tolist(), strict=True):
        if is_in:
            total -= row[label] - math.log(sum(math.exp(x) for x in row))
    assert sft_loss(token_logprobs(logits, labels), mask).item() == pytest.approx(total / 5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7, 0.0])
def test_token_logprobs_are_of_the_temperature_scaled_distribution(temperature):
    torch.manual_seed(1)
    logits = torch.randn(5, 7) * 3
    labels = torch.randint(7, (5,))
    scale = temperature or 1.0
    for row, label, got in zip(
        logits.tolist(),
        labels.tolist(),
        token_logprobs(logits, labels, temperature).tolist(),
        strict=True,
    ):
        scaled = [x / scale for x in row]
        peak = max(scaled)
        norm = peak + math.log(sum(math.exp(x - peak) for x in scaled))
        assert got == pytest.approx(scaled[label] - norm, abs=1e-5)
