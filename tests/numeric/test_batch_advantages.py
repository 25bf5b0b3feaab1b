"""What a batch is judged to be, without any model: slow loops over its columns."""

from __future__ import annotations

import math

import pytest
import torch

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.errors import ConfigError
from tests.numeric.policies import batch_of
from trainer.algorithms.batch_advantages import compute_advantages
from trainer.batching.sequences import batch_of_trajectories, with_greedy_samples

KL_COEF = 0.3


def told_batch():
    """A batch with what models would say of it."""
    rows = batch_of(0)
    batch = batch_of_trajectories(rows)
    generator = torch.Generator().manual_seed(3)
    names = ("proximal_logprobs", "reference_logprobs", "teacher_logprobs")
    noise = {name: torch.randn(batch.num_tokens, generator=generator) for name in names}
    told = {name: batch["behaviour_logprobs"] + 0.5 * noise[name] for name in names}
    # What no action is judged by may be anything.
    mask = batch["action_mask"]
    told["entropy"] = torch.rand(batch.num_tokens, generator=generator)
    told["teacher_logprobs"] = torch.where(mask, told["teacher_logprobs"], -torch.inf)
    told["reference_logprobs"] = torch.where(mask, told["reference_logprobs"], torch.nan)
    return rows, batch.with_columns(**told)


def group_advantages_of(rows) -> list[float]:
    result = []
    for row in rows:
        siblings = [r.reward for r in rows if r.rollout_id == row.rollout_id]
        mean = math.fsum(siblings) / len(siblings)
        variance = math.fsum((r - mean) ** 2 for r in siblings) / max(1, len(siblings) - 1)
        result.append((row.reward - mean) / (math.sqrt(variance) + 1e-6))
    return result


def pieces_of(batch, *names):
    columns = [torch.split(batch[name], list(batch.lengths)) for name in names]
    return [[piece.tolist() for piece in pieces] for pieces in zip(*columns, strict=True)]


@pytest.mark.parametrize("proximal", ["recompute", "loglinear"])
def test_a_penalty_in_the_reward_is_what_an_action_and_later_ones_cost(proximal):
    """Beside a group's baseline, of which it is no part."""
    rows, batch = told_batch()
    config = AlgorithmConfig(kl_in="reward", kl_coef=1.0, kl_estimator="k2", proximal=proximal)
    told = batch
    if proximal == "loglinear":  # then nobody asked the policy
        kept = {n: c for n, c in batch.columns.items() if n != "proximal_logprobs"}
        told = type(batch)(batch.lengths, kept)
    judged, metrics = compute_advantages(config, told, version=1, kl_coef=KL_COEF)
    policy = "proximal_logprobs" if proximal == "recompute" else "behaviour_logprobs"
    names = ("action_mask", policy, "reference_logprobs")
    costs = []
    for (mask, policy, reference), got, gain in zip(
        pieces_of(batch, *names),
        pieces_of(judged, "advantages"),
        group_advantages_of(rows),
        strict=True,
    ):
        later = 0.0
        for t in reversed(range(len(mask))):
            if mask[t]:
                cost = (policy[t] - reference[t]) ** 2 / 2
                costs.append(cost)
                later += cost
                assert got[0][t] == pytest.approx(gain - KL_COEF * later, rel=1e-4, abs=1e-5)
    assert metrics["reference_kl"] == pytest.approx(math.fsum(costs) / len(costs), rel=1e-5)
    assert metrics["kl_coef"] == KL_COEF


def test_what_a_teacher_says_is_added_to_each_actions_advantage_after_its_normalisation():
    _, batch = told_batch()
    options = {"advantage_norm": "batch", "mask_truncated": True}
    plain, _ = compute_advantages(AlgorithmConfig(**options), batch, version=0, kl_coef=0.0)
    config = AlgorithmConfig(**options, distillation_coef=0.25)
    judged, metrics = compute_advantages(config, batch, version=0, kl_coef=0.0)
    mask = judged["loss_mask"]
    gaps = (batch["teacher_logprobs"] - batch["proximal_logprobs"])[mask]
    gained = (judged["advantages"] - plain["advantages"])[mask]
    torch.testing.assert_close(gained, 0.25 * gaps, atol=1e-5, rtol=0)
    assert metrics["teacher_kl"] == pytest.approx(-float(gaps.double().mean()), rel=1e-5)
    assert torch.isfinite(judged["advantages"]).all()
    assert mask.sum() < batch["action_mask"].sum()


def test_the_threshold_of_the_second_moment_is_of_the_whole_batch():
    _, batch = told_batch()
    judged, _ = compute_advantages(AlgorithmConfig(m2_threshold=0.1), batch, version=0, kl_coef=0.0)
    mask = batch["action_mask"]
    squares = (batch["proximal_logprobs"] - batch["behaviour_logprobs"]).double().square()
    ascending = sorted(squares[mask].tolist())
    sizes = range(1, len(ascending) + 1)
    num_kept = max(k for k in sizes if math.fsum(ascending[:k]) / k < 0.1)
    kept = judged["near"] & mask
    assert 0 < num_kept < len(ascending)
    assert int(kept.sum()) == num_kept
    assert squares[kept].max() <= squares[mask & ~kept].min()


def test_the_entropy_is_that_of_the_tokens_in_the_loss_unless_the_loss_tells_it():
    _, batch = told_batch()
    judged, metrics = compute_advantages(
        AlgorithmConfig(mask_truncated=True), batch, version=0, kl_coef=0.0
    )
    kept = judged["entropy"][judged["loss_mask"]].tolist()
    assert len(kept) < batch["action_mask"].sum()
    assert metrics["entropy"] == pytest.approx(math.fsum(kept) / len(kept), rel=1e-5)
    config = AlgorithmConfig(mask_truncated=True, entropy_coef=0.01)
    _, others = compute_advantages(config, batch, version=0, kl_coef=0.0)
    assert metrics.keys() - others.keys() == {"entropy"}


def test_nothing_is_asked_of_models_that_are_not_there():
    rows = batch_of(0)
    config = AlgorithmConfig(decoupled=False)
    judged, metrics = compute_advantages(
        config, batch_of_trajectories(rows), version=0, kl_coef=0.0
    )
    assert metrics == {}
    assert "proximal_logprobs" not in judged.columns  # the loss takes the behaviour's
    of_rows = judged.per_sequence("advantages").tolist()
    assert of_rows == pytest.approx(group_advantages_of(rows), rel=1e-5, abs=1e-6)


def test_remax_learns_nothing_of_the_greedy_sample_and_the_difference_to_it_of_the_others():
    rows, batch = told_batch()
    batch = with_greedy_samples(batch, rows)
    config = AlgorithmConfig(advantage={"type": "remax"}, decoupled=False)
    judged, _ = compute_advantages(config, batch, version=0, kl_coef=0.0)
    greedy = {row.rollout_id: row.reward for row in rows if row.sample_index == 0}
    for row, (got,) in zip(rows, pieces_of(judged, "advantages"), strict=True):
        expected = row.reward - greedy[row.rollout_id]
        assert got == pytest.approx([expected] * len(got), abs=1e-6)


def test_an_estimator_that_reads_no_values_beside_a_critic_is_refused():
    _, batch = told_batch()
    batch = batch.with_columns(values=torch.zeros(batch.num_tokens))
    with pytest.raises(ConfigError, match=r"advantage\.type=grpo gives no returns"):
        compute_advantages(AlgorithmConfig(decoupled=False), batch, version=0, kl_coef=0.0)


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
def test_what_a_loss_prepares_is_the_same_on_every_rank_and_after_a_restart(kind):
    _, batch = told_batch()
    section = {"type": kind, "share": 0.2}
    section |= {"covariance_lower": 0.0} if kind == "clip_cov" else {}
    config = AlgorithmConfig(policy_loss=section)
    first, again = (compute_advantages(config, batch, 3, 0.0)[0]["prepared"] for _ in range(2))
    assert torch.equal(first, again)
    assert 0 < int(first.sum()) <= int(0.2 * int(batch["action_mask"].sum()))


def test_normalised_weights_average_to_1_over_the_batch():
    _, batch = told_batch()
    config = AlgorithmConfig(behaviour_weight_normalize=True, behaviour_weight_cap=1.2)
    judged, _ = compute_advantages(config, batch, version=0, kl_coef=0.0)
    mask = judged["loss_mask"]
    gaps = (batch["proximal_logprobs"] - batch["behaviour_logprobs"])[mask].double()
    weights = [w if w <= 1.2 else 0.0 for w in gaps.exp().tolist()]
    factor = judged["weight_factor"].unique().item()
    assert factor * math.fsum(weights) / len(weights) == pytest.approx(1.0, rel=1e-5)
