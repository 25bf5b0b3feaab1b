"""Policy losses of `policy_loss.type` by hand, and what they prepare over a whole batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headway.contracts.config.algorithm import AlgorithmConfig
from tests.numeric.packed import actions, random_batch, segments_of
from tests.numeric.policies import experiment, open_models, train
from trainer.algorithms.covariance import covariances, draw_between, mark_largest
from trainer.algorithms.importance_weights import (
    behaviour_weights,
    interpolated_proximal,
    is_off_policy,
    normalizing_factor,
    proximal_shares,
)
from trainer.algorithms.losses import policy_loss
from trainer.algorithms.objectives import dppo_objective, gmpo_objective
from trainer.algorithms.policy_loss_registry import BatchTokens, chosen_policy_loss
from trainer.algorithms.ratios import log_ratios
from trainer.algorithms.segments import Segments
from trainer.batching.sequences import SequenceBatch


def exact(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_gmpo_by_hand():
    """Ratios e^0.2 and e^0.6 with A = 2: the second is bounded at e^0.4, and the mean is e^0.3. With
    A = -1 the bound is below: e^-0.6 becomes e^-0.4, and e^0.6 stays."""
    logs = exact(0.2, 0.6, -0.6, 0.6).requires_grad_()
    mask, sequences = torch.ones(4, dtype=torch.bool), Segments.of_lengths((2, 2))
    got, is_clipped = gmpo_objective(logs, exact(2.0, 2.0, -1.0, -1.0), mask, sequences, 0.4)
    first, second = 2 * math.exp(0.3), -math.exp(0.1)
    assert got.tolist() == pytest.approx([first, first, second, second])
    assert is_clipped.tolist() == [False, True, True, False]
    got.sum().backward()
    assert logs.grad.tolist() == pytest.approx([first, 0.0, 0.0, second])


@pytest.mark.parametrize(
    ("advantage", "behaviour", "policy", "is_masked"),
    [
        (1.0, 0.6, 0.9, True),  # 0.3 further in the direction of the advantage
        (1.0, 0.6, 0.7, False),
        (1.0, 0.6, 0.3, False),  # against it
        (-1.0, 0.6, 0.3, True),
        (-1.0, 0.6, 0.9, False),
        (1.0, 0.001, 0.01, False),  # a ratio of 10, and a probability that hardly moved
        (0.0, 0.6, 0.3, True),
    ],
)
def test_dppo_leaves_out_what_moved_far_in_the_direction_of_its_advantage(
    advantage, behaviour, policy, is_masked
):
    logprobs = exact(math.log(policy)).requires_grad_()
    ratio = (logprobs - math.log(behaviour)).exp()
    columns = (ratio, logprobs, exact(math.log(behaviour)), exact(advantage))
    got, masked = dppo_objective(*columns, "tv", 0.2, 0.2)
    assert masked.tolist() == [is_masked]
    got.sum().backward()
    slope = 0.0 if is_masked else policy / behaviour * advantage
    assert logprobs.grad.tolist() == pytest.approx([slope])


def test_the_binary_kl_of_dppo_by_hand():
    """KL(0.5 || 0.8) = ln(0.5/0.8)/2 + ln(0.5/0.2)/2 = ln(1.25) = 0.2231 nats."""
    policy, behaviour = exact(math.log(0.8)), exact(math.log(0.5))
    columns = ((policy - behaviour).exp(), policy, behaviour, exact(1.0))
    assert math.log(1.25) == pytest.approx(0.2231, abs=1e-4)
    for bound, is_masked in ((0.2231, True), (0.2232, False)):
        assert dppo_objective(*columns, "kl", 0.0, bound)[1].tolist() == [is_masked]


def test_the_kl_of_dppo_masks_a_token_that_became_certain():
    columns = (exact(2.0), exact(1e-9), exact(math.log(0.5)), exact(1.0))
    got, is_masked = dppo_objective(*columns, "kl", 0.1, 0.1)
    assert (got.tolist(), is_masked.tolist()) == ([0.0], [True])


def test_reinforce_weighs_each_gradient_by_its_advantage_alone():
    config = AlgorithmConfig(policy_loss={"type": "reinforce"}, decoupled=False)
    batch = random_batch(2)
    logprobs = batch["logprobs"].clone().requires_grad_()
    policy_loss(config, batch, logprobs)[0].backward()
    mask = batch["loss_mask"]
    expected = torch.where(mask, -batch["advantages"] / mask.sum(), 0.0)
    torch.testing.assert_close(logprobs.grad, expected)


@pytest.mark.parametrize("seed", range(3))
def test_covariances_equal_the_slow_loop(seed):
    batch = random_batch(seed)
    rows = [t for inside in actions(batch) for t in inside]
    logprobs, advantages = batch["logprobs"].tolist(), batch["advantages"].tolist()
    means = [math.fsum(c[t] for t in rows) / len(rows) for c in (logprobs, advantages)]
    expected = [0.0] * batch.num_tokens
    for t in rows:
        expected[t] = (logprobs[t] - means[0]) * (advantages[t] - means[1])
    got = covariances(batch["logprobs"], batch["advantages"], batch["loss_mask"])
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_largest_are_marked_and_the_earlier_among_equals():
    values, mask = exact(9.0, 2.0, 5.0, 5.0, 1.0), torch.tensor([False, True, True, True, True])
    assert mark_largest(values, mask, 1).tolist() == [False, False, True, False, False]
    assert mark_largest(values, mask, 3).tolist() == [False, True, True, True, False]
    assert mark_largest(values, mask, 9).tolist() == mask.tolist()


def test_tokens_are_drawn_between_the_bounds_the_same_for_a_seed():
    values, mask = torch.arange(40.0), torch.arange(40) % 2 == 0
    drawn = [draw_between(values, mask, 9.0, 30.0, 4, seed) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    for marked in drawn:
        assert int(marked.sum()) == 4
        assert all(9 < v < 30 and v % 2 == 0 for v in values[marked].tolist())
    every = draw_between(values, mask, 9.0, 30.0, 99, 0)
    assert values[every].tolist() == [float(v) for v in range(10, 30, 2)]


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
def test_what_is_marked_are_the_most_covariant_tokens_of_the_whole_batch(kind):
    batch = random_batch(4)
    mask = batch["loss_mask"]
    section = {"type": kind, "share": 0.2}
    if kind == "clip_cov":
        section |= {"covariance_lower": 0.3, "covariance_upper": 50.0}
    loss, args = chosen_policy_loss(AlgorithmConfig(policy_loss=section).policy_loss)
    tokens = BatchTokens(batch["logprobs"], batch["advantages"], mask, segments_of(batch), 7)
    marked = loss.prepare(args, tokens)
    values = covariances(batch["logprobs"], batch["advantages"], mask)
    count = int(0.2 * int(mask.sum()))
    assert 0 < int(marked.sum()) <= count and not marked[~mask].any()
    if kind == "kl_cov":
        assert values[marked].min() >= values[mask & ~marked].max()
    else:
        assert ((values[marked] > 0.3) & (values[marked] < 50.0)).all()


def test_opsm_by_hand():
    """Mean log(behaviour / policy) is 0.3 of the first sequence and -0.1 of the second."""
    gone, advantages = exact(0.5, 0.1, -0.3, 0.1), exact(-1.0, 1.0, -1.0, 1.0)
    mask, sequences = torch.ones(4, dtype=torch.bool), Segments.of_lengths((2, 2))
    columns = (gone, advantages, mask, sequences)
    assert is_off_policy(*columns, 0.2).tolist() == [True, False, False, False]
    assert not is_off_policy(*columns, 0.31).any()


def test_opsm_takes_the_gradient_of_masked_tokens():
    config = AlgorithmConfig(opsm_threshold=0.0, decoupled=False)
    columns = {
        "loss_mask": torch.ones(4, dtype=torch.bool),
        "behaviour_logprobs": exact(-1.0, -1.0, -1.0, -1.0),
        "advantages": exact(-1.0, -1.0, -1.0, 1.0),
    }
    logprobs = exact(-1.1, -1.1, -0.9, -0.9).requires_grad_()
    loss, stats = policy_loss(config, SequenceBatch((2, 2), columns), logprobs)
    loss.backward()
    assert logprobs.grad[:2].tolist() == [0.0, 0.0] and (logprobs.grad[2:] != 0).all()
    assert stats["capped_fraction"].item() == 0.5


@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
def test_normalised_weights_have_a_mean_of_1(level):
    batch = random_batch(5)
    mask, sequences = batch["loss_mask"], segments_of(batch)
    logs = log_ratios(batch["proximal_logprobs"], batch["behaviour_logprobs"], mask)
    weights, _ = behaviour_weights(logs, mask, sequences, level, None, 1.5, "clamp")
    weights = weights * normalizing_factor(weights, mask, sequences, level)
    rows = [inside for inside in actions(batch) if inside]
    if level == "token":
        values = [weights[t].item() for inside in rows for t in inside]
    else:
        values = [weights[inside[0]].item() for inside in rows]
    assert math.fsum(values) / len(values) == pytest.approx(1.0)
    assert normalizing_factor(torch.zeros_like(weights), mask, sequences, level) == 1.0


def test_the_linear_proximal_lies_between_the_probabilities():
    versions = torch.tensor([5, 4, 2, -1])
    behaviour, current = exact(-1.0, -1.0, -2.0, -1.0), exact(-3.0, -3.0, -0.5, -3.0)
    shares = proximal_shares(versions, version=5)  # 0, 1/2, 3/4, 0
    got = interpolated_proximal(current, behaviour, shares, "linear")
    expected = [
        -1.0,
        math.log(0.5 * math.exp(-1.0) + 0.5 * math.exp(-3.0)),
        math.log(0.25 * math.exp(-2.0) + 0.75 * math.exp(-0.5)),
        -1.0,
    ]
    assert got.tolist() == pytest.approx(expected, rel=1e-6)


def test_the_corrected_kl_has_the_gradient_of_the_kl_although_another_policy_sampled():
    """Over all tokens of a small vocabulary, weighed by the probabilities that they were sampled with."""
    generator = torch.Generator().manual_seed(0)
    shape = {"generator": generator, "dtype": torch.float64}
    logits, reference, behaviour = (torch.randn(6, **shape) for _ in range(3))
    logits.requires_grad_()
    policy = logits.log_softmax(0)
    reference, behaviour = reference.log_softmax(0), behaviour.log_softmax(0)
    config = AlgorithmConfig(kl_coef=1.0, kl_bias_correction=True, decoupled=False, kl_bound=1e6)
    expected = (policy.exp() * (policy - reference)).sum()
    (slopes,) = torch.autograd.grad(expected, logits, retain_graph=True)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(6):
        columns = {
            "loss_mask": torch.ones(1, dtype=torch.bool),
            "behaviour_logprobs": behaviour[token : token + 1],
            "reference_logprobs": reference[token : token + 1],
            "advantages": exact(0.0),
        }
        one = SequenceBatch((1,), columns)
        loss, _ = policy_loss(config, one, policy[token : token + 1])
        total = total + behaviour[token].exp() * loss
    assert total.item() == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(torch.autograd.grad(total, logits)[0], slopes)


WHOLE_STEPS = {
    "clip_cov": {
        "algorithm": {
            "policy_loss": {"type": "clip_cov", "share": 0.1, "covariance_lower": 0.0},
            "behaviour_weight_normalize": True,
            "num_minibatches": 2,
            "length_penalty": {"coef": 0.5},
        }
    },
    "dppo": {
        "algorithm": {
            "policy_loss": {"type": "dppo", "square_coef": 0.001},
            "decoupled": False,
            "opsm_threshold": 0.05,
            "advantage": {"type": "opo"},
        }
    },
    "remax": {
        "algorithm": {
            "policy_loss": {"type": "gmpo"},
            "advantage": {"type": "remax"},
            "proximal": "linear",
            "num_minibatches": 2,
        },
        "rollout": {
            "reward": {"name": "exact"},
            "workflow": {"name": "single_turn", "args": {"greedy_first": True}},
        },
    },
}


@pytest.mark.parametrize("name", WHOLE_STEPS)
def test_a_step_hands_each_loss_the_columns_that_it_reads(llama_dir, name):
    models = open_models(experiment(llama_dir, "grpo", **WHOLE_STEPS[name]))
    metrics = train(models, range(2))[-1]
    assert metrics["grad_norm"] > 0.0 and all(math.isfinite(v) for v in metrics.values())
    models.destroy()
