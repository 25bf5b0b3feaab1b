"""The divergence over the top of a vocabulary, against a slow loop."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.algorithms.distillation import top_divergence

T, V, K = 6, 11, 4


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    policy, teacher = (
        torch.randn(T, V, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return policy, teacher.log_softmax(1)


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_it_equals_the_slow_loop_and_is_at_most_the_whole(divergence):
    logits, teacher = tables()
    policy = logits.log_softmax(1)
    top = teacher.topk(K).indices
    got = top_divergence(policy.gather(1, top), teacher.gather(1, top), divergence)
    for t in range(T):
        p, q = ([math.exp(table[t, i]) for i in top[t]] for table in (policy, teacher))
        p, q = ([*each, 1 - sum(each)] for each in (p, q))
        whole = (policy[t], teacher[t])
        if divergence == "forward":
            p, q, whole = q, p, whole[::-1]
        expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert got[t].item() == pytest.approx(expected, rel=1e-12)
        assert 0 < expected <= (whole[0].exp() * (whole[0] - whole[1])).sum().item()


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
@pytest.mark.parametrize("count", [1, K, V])
def test_its_gradient_equals_finite_differences(divergence, count):
    logits, teacher = tables()
    top = teacher.topk(count).indices

    def loss(logits):
        policy = logits.log_softmax(1).gather(1, top)
        return top_divergence(policy, teacher.gather(1, top), divergence)

    assert torch.autograd.gradcheck(loss, (logits.requires_grad_(),), atol=2e-5)


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_it_is_nothing_between_equals_and_finite_at_certainty(divergence):
    _, teacher = tables()
    top = teacher.topk(K).values
    torch.testing.assert_close(top_divergence(top, top, divergence), torch.zeros(T).double())
    certain = torch.tensor([[0.0, -60.0]]).requires_grad_()
    unsure = torch.tensor([[-0.7, -0.7]])
    for policy, other in ((certain, unsure), (unsure.requires_grad_(), certain.detach())):
        loss = top_divergence(policy, other, divergence).sum()
        (gradient,) = torch.autograd.grad(loss, policy)
        assert loss.isfinite() and gradient.isfinite().all()
