"""Estimates of the KL, their gradients, and the controllers."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate

FORMULAS = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "abs": abs,
}
SLOPES = {
    "k1": lambda d: 1.0,
    "k2": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
    "abs": lambda d: math.copysign(1.0, d),
}
GAPS = [-1.5, -0.2, 0.3, 2.0]


@pytest.mark.parametrize("estimator", FORMULAS)
@pytest.mark.parametrize("straight_through", [True, False])
def test_estimates_and_gradients_equal_their_formulas(estimator, straight_through):
    logprobs = torch.tensor(GAPS, dtype=torch.float64).requires_grad_()
    reference = torch.zeros(4, dtype=torch.float64)
    got = kl_estimate(logprobs, reference, estimator, straight_through=straight_through)
    got.sum().backward()
    slopes = SLOPES["k2" if straight_through else estimator]
    assert got.tolist() == pytest.approx([FORMULAS[estimator](d) for d in GAPS], rel=1e-12)
    assert logprobs.grad.tolist() == pytest.approx([slopes(d) for d in GAPS], rel=1e-12)


@pytest.mark.parametrize("estimator", FORMULAS)
def test_estimates_are_bounded_and_finite(estimator):
    gaps = torch.tensor([-1e4, -math.inf, 1e4])
    got = kl_estimate(gaps, torch.zeros(3), estimator)
    assert got.abs().max() <= 10.0
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("estimator", FORMULAS)
def test_far_away_the_straight_gradient_still_pulls_back_and_the_estimates_own_does_not(estimator):
    gaps = [-25.0, -15.0, 15.0, 25.0]
    reference = torch.zeros(4)
    near, far = torch.tensor(gaps, requires_grad=True), torch.tensor(gaps, requires_grad=True)
    straight = kl_estimate(far, reference, estimator, straight_through=True)
    estimate = kl_estimate(near, reference, estimator)
    straight.sum().backward()
    estimate.sum().backward()
    assert straight.tolist() == estimate.tolist()
    assert far.grad.tolist() == gaps
    bounded = [abs(FORMULAS[estimator](d)) > 10.0 for d in gaps]
    assert [slope == 0.0 for slope in near.grad.tolist()] == bounded


def test_what_is_masked_out_may_be_infinite():
    logprobs = torch.tensor([-math.inf, -1.0], requires_grad=True)
    terms = kl_estimate(logprobs, torch.zeros(2), straight_through=True)
    torch.where(torch.tensor([False, True]), terms, 0.0).sum().backward()
    assert logprobs.grad.tolist() == [0.0, -1.0]


def categorical() -> tuple[torch.Tensor, torch.Tensor, float]:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    exact = float((policy * (policy / reference).log()).sum())
    return policy, reference, exact


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_expectation_of_the_kl(estimator):
    policy, reference, exact = categorical()
    mean = (policy * kl_estimate(policy.log(), reference.log(), estimator)).sum()
    assert mean.item() == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_only_k2_and_straight_through_have_the_gradient_of_the_kl(estimator):
    policy, reference, _ = categorical()

    def gradient(straight_through: bool) -> torch.Tensor:
        logits = policy.log().requires_grad_()
        logprobs = torch.log_softmax(logits, 0)
        terms = kl_estimate(logprobs, reference.log(), estimator, straight_through=straight_through)
        (policy * terms).sum().backward()  # the tokens were sampled: no gradient through that
        return logits.grad

    logits = policy.log().requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    (logprobs.exp() * (logprobs - reference.log())).sum().backward()
    torch.testing.assert_close(gradient(True), logits.grad)
    if estimator == "k2":
        torch.testing.assert_close(gradient(False), logits.grad)
    elif estimator == "k1":
        torch.testing.assert_close(gradient(False), torch.zeros(3, dtype=torch.float64))
    else:
        assert (gradient(False) - logits.grad).abs().max() > 0.01


def test_the_coefficient_rises_while_the_kl_is_above_its_target():
    controller = AdaptiveKL(0.1, target=6.0, horizon=10_000)
    controller.update(kl=6.6, num_sequences=100)
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 100 / 10_000))
    controller.update(kl=60.0, num_sequences=100)  # at most 20 %
    assert controller.coef == pytest.approx(0.1 * 1.001 * (1 + 0.2 * 0.01))
    controller = AdaptiveKL(0.1, target=6.0, horizon=10_000)
    controller.update(kl=0.0, num_sequences=100)
    assert controller.coef == pytest.approx(0.1 * (1 - 0.2 * 0.01))


@pytest.mark.parametrize("make", [lambda c: FixedKL(c), lambda c: AdaptiveKL(c, 1.0, 10)], ids="fa")
def test_a_controller_goes_on_from_a_checkpoint(make):
    first, second = make(0.1), make(0.7)
    first.update(5.0, 3)
    second.load_state_dict(first.state_dict())
    first.update(0.2, 3)
    second.update(0.2, 3)
    assert first == second


def test_a_fixed_coefficient_stays():
    controller = FixedKL(0.1)
    controller.update(100.0, 10_000)
    assert controller.coef == 0.1
