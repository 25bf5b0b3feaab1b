"""Every field of the section `ppo`, by what it does to numbers: through the configurations that follow
from it, against loops in float64 and against hand tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from headway.contracts.config.ppo_code import PPOCodeExperiment
from headway.contracts.config.ppo_settings import PPOCodeConfig
from headway.contracts.errors import RewardError
from headway.contracts.types import Trajectory, TrajectoryBatch, TrajectoryGroup, Turn
from headway.launch.quickstart import task
from tests.numeric.engines import OPTIMIZER, assert_close, bare, open_engine, parameters_of
from tests.numeric.policies import ALONE, batch_of
from trainer.algorithms.answer_format import answer_score
from trainer.algorithms.averaging import move_towards
from trainer.algorithms.batch_advantages import compute_advantages
from trainer.algorithms.kl import AdaptiveKL
from trainer.algorithms.losses import policy_loss
from trainer.algorithms.masked_statistics import MaskedStatistics
from trainer.algorithms.selection import keep_best
from trainer.algorithms.values import value_losses
from trainer.api import MicroBatchSpec
from trainer.batching.checks import check_verifier
from trainer.batching.running_scores import running_scores
from trainer.batching.sequences import SequenceBatch, batch_of_trajectories
from trainer.data import PromptData
from trainer.data_supervised import Encoder
from trainer.interfaces.ppo_actor import PPOActor
from trainer.interfaces.ppo_critic import PPOCritic, make_normalizer
from trainer.prompt_filter import PromptFilter, filled_prompts, make_prompt_filter

SHOWN: set[str] = set()
"""Fields that a test here is about."""


def shows(*fields: str) -> Callable:
    def note(test: Callable) -> Callable:
        SHOWN.update(fields)
        return test

    return note


def experiment(sections: dict | None = None, **ppo) -> PPOCodeExperiment:
    tree = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "weight_sync": {"root": "w"},
        "ppo": ppo,
    }
    return PPOCodeExperiment.model_validate(tree | (sections or {}))


# --- what is judged of a batch -------------------------------------------------------------------


def told() -> tuple[list[Trajectory], dict[str, torch.Tensor]]:
    """Trajectories of verified answers, and what models and verifier say of each of their tokens."""
    rows = [replace(row, reward=1.0 if i % 3 else -1.0) for i, row in enumerate(batch_of(0))]
    generator = torch.Generator().manual_seed(11)
    size = sum(row.num_tokens for row in rows)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(size, generator=generator)

    behaviour = batch_of_trajectories(rows)["behaviour_logprobs"]
    columns = {
        "reference_logprobs": behaviour + noise(0.7),
        "values": noise(0.5),
        "dense_scores": noise(2.0),
    }
    return rows, columns


def judged(**ppo) -> tuple[SequenceBatch, dict[str, float]]:
    config = experiment(**ppo)
    rows, columns = told()
    asked = {"dense_scores"} if config.ppo.use_dense_reward else set()
    asked |= {"reference_logprobs"} if config.ppo.kl_ctl > 0 else set()
    asked |= set() if config.critic is None else {"values"}
    batch = batch_of_trajectories(rows).with_columns(**{n: columns[n] for n in asked})
    return compute_advantages(config.algorithm, batch, version=0, kl_coef=config.algorithm.kl_coef)


def clip(x: float, bound: float) -> float:
    return max(-bound, min(bound, x))


def slow_rewards(ppo: PPOCodeConfig, row: Trajectory, reference, dense) -> list[float]:
    """Of each action of a row, in float64."""
    size = row.num_tokens
    mask = [bool(row.loss_mask[t + 1]) for t in range(size - 1)]
    rewards = [0.0] * size
    for t in range(size - 1):
        if mask[t]:
            rewards[t] = -ppo.kl_ctl * clip(float(row.logprobs[t + 1]) - reference[t], 10.0)
    if ppo.use_dense_reward:
        bounded = [clip(d, ppo.max_reward_clip) for d in dense]
        for t in range(size - 1):
            if mask[t]:
                rewards[t] += bounded[t + 1] - (bounded[t] if ppo.reward_delta else 0.0)
        return rewards
    score = clip(
        (row.reward - ppo.reward_output_bias) * ppo.reward_output_scaling, ppo.max_reward_clip
    )
    if row.stop_reason == "length" and ppo.mask_no_eos_with_zero:
        score = 0.0
    rewards[max(t for t in range(size - 1) if mask[t])] += score
    return rewards


def slow_judgement(**options) -> tuple[list[float], list[float], list[bool], list[float]]:
    """Advantages, returns, mask and KL of every row of the batch, by loops."""
    ppo = PPOCodeConfig.model_validate(options)
    rows, columns = told()
    advantages, returns, in_loss, kls, groups = [], [], [], [], []
    start = 0
    for row in rows:
        size = row.num_tokens
        span = slice(start, start + size)
        start += size
        reference, values = (columns[n][span].tolist() for n in ("reference_logprobs", "values"))
        values = [0.0] * size if ppo.disable_value else values
        is_cut = row.stop_reason == "length"
        if not is_cut:
            values[-1] = 0.0
        rewards = slow_rewards(ppo, row, reference, columns["dense_scores"][span].tolist())
        gains, last = [0.0] * size, 0.0
        for t in reversed(range(size - 1)):
            if row.loss_mask[t + 1]:
                error = rewards[t] + ppo.discount * values[t + 1] - values[t]
                last = error + ppo.discount * ppo.gae_lambda * last
                gains[t] = last
        for t in range(size):
            is_action = t < size - 1 and bool(row.loss_mask[t + 1])
            is_in = is_action and not (is_cut and ppo.mask_too_long)
            advantages.append(gains[t])
            returns.append(gains[t] + values[t])
            in_loss.append(is_in)
            groups.append(row.rollout_id if ppo.group_adv_norm else "all")
            if is_in:
                kls.append(clip(float(row.logprobs[t + 1]) - reference[t], 10.0))
    if not ppo.adv_norm:
        return advantages, returns, in_loss, kls
    for name in set(groups):
        of_group = [t for t in range(len(groups)) if groups[t] == name]
        counted = [advantages[t] for t in of_group if in_loss[t]]
        mean = math.fsum(counted) / max(len(counted), 1)
        variance = math.fsum((a - mean) ** 2 for a in counted) / max(len(counted), 1)
        for t in of_group:
            advantages[t] = (advantages[t] - mean) / (math.sqrt(variance) + 1e-5)
    return advantages, returns, in_loss, kls


def kept(values, mask) -> list[float]:
    return [value for value, is_in in zip(values, mask, strict=True) if is_in]


def check_against_loops(**ppo) -> None:
    batch, metrics = judged(**ppo)
    advantages, returns, mask, kls = slow_judgement(**ppo)
    assert batch["loss_mask"].tolist() == mask
    got = kept(batch["advantages"].tolist(), mask)
    assert got == pytest.approx(kept(advantages, mask), rel=1e-4, abs=1e-4)
    if not ppo.get("disable_value"):
        got = kept(batch["returns"].tolist(), mask)
        assert got == pytest.approx(kept(returns, mask), rel=1e-4, abs=1e-4)
    if ppo.get("kl_ctl", 0.1) > 0:
        assert metrics["reference_kl"] == pytest.approx(math.fsum(kls) / len(kls), abs=1e-5)


RAW = {"adv_norm": False}


@shows(
    *("kl_ctl", "discount", "gae_lambda", "disable_value", "max_reward_clip"),
    *("reward_output_scaling", "reward_output_bias", "use_dense_reward", "reward_delta"),
    *("mask_no_eos_with_zero", "mask_too_long", "adv_norm", "group_adv_norm"),
)
@pytest.mark.parametrize(
    "options",
    [
        {"kl_ctl": 0.5},
        {"kl_ctl": 0.0},
        {"discount": 0.9},
        {"gae_lambda": 0.8},
        {"gae_lambda": 0.0},
        {"discount": 0.9, "gae_lambda": 0.8},
        {"disable_value": True},
        {"disable_value": True, "kl_ctl": 0.0},
        {"disable_value": True, "discount": 0.9, "gae_lambda": 0.8},
        {"disable_value": True, "gae_lambda": 0.0},
        {"max_reward_clip": 0.25},
        {"reward_output_scaling": 5.0},
        {"reward_output_bias": 0.5},
        {"reward_output_bias": 0.5, "reward_output_scaling": 10.0, "max_reward_clip": 12.0},
        {"use_dense_reward": True},
        {"use_dense_reward": True, "max_reward_clip": 1.0, "discount": 0.9},
        {"use_dense_reward": True, "reward_delta": False},
        {"use_dense_reward": True, "disable_value": True, "gae_lambda": 0.8},
        {"mask_no_eos_with_zero": True},
        {"mask_too_long": True},
        {"mask_too_long": True, "mask_no_eos_with_zero": True, "disable_value": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("norm", [RAW, {}, {"group_adv_norm": True}], ids=str)
def test_a_batch_is_judged_as_the_loops_judge_it(options, norm):
    check_against_loops(**options, **norm)
    plain, _ = judged(**norm)
    changed, _ = judged(**options, **norm)
    if norm == RAW:  # the others take a bias of all rewards off again
        both = plain["loss_mask"] & changed["loss_mask"]
        moved = (plain["advantages"] - changed["advantages"])[both].abs().max() > 1e-3
        assert moved or not torch.equal(plain["loss_mask"], changed["loss_mask"])


def test_an_answer_without_an_end_loses_its_score_and_pays_its_kl():
    """By hand: no values, so the first action's advantage is all that the answer earned."""
    rows, columns = told()
    plain, _ = judged(disable_value=True, **RAW)
    masked, _ = judged(disable_value=True, mask_no_eos_with_zero=True, **RAW)
    start = 0
    for row in rows:
        first = start + int(row.loss_mask.argmax()) - 1
        difference = float(plain["advantages"][first] - masked["advantages"][first])
        assert difference == pytest.approx(row.reward if row.stop_reason == "length" else 0.0)
        start += row.num_tokens
    assert torch.isfinite(columns["values"]).all()


def test_a_sequence_that_ended_is_worth_nothing_behind_its_end():
    """By hand: two answers of one action each, of reward 1, with values 0.5 and 7 behind the last."""

    def row(sample: int, reason: str) -> Trajectory:
        return Trajectory(
            rollout_id="r",
            group_id="row-0.0",
            sample_index=sample,
            input_ids=np.array([3, 4], np.int32),
            loss_mask=np.array([False, True]),
            logprobs=np.array([0.0, -1.0], np.float32),
            versions=np.array([-1, 0], np.int32),
            reward=1.0,
            stop_reason=reason,
        )

    batch = batch_of_trajectories([row(0, "stop"), row(1, "length")])
    batch = batch.with_columns(values=torch.tensor([0.5, 7.0, 0.5, 7.0]))
    config = experiment(kl_ctl=0.0, discount=0.5, **RAW).algorithm
    got, _ = compute_advantages(config, batch, version=0, kl_coef=0.0)
    assert got["advantages"].tolist() == [1 - 0.5, 0.0, 1 + 0.5 * 7 - 0.5, 0.0]
    assert got["returns"].tolist() == [1.0, 0.0, 1 + 0.5 * 7, 0.0]


@pytest.mark.parametrize("norm", [{}, {"group_adv_norm": True}], ids=str)
def test_equal_returns_of_a_group_do_not_blow_up(norm):
    rows = [replace(row, reward=1.0) for row in batch_of(0)]
    config = experiment(disable_value=True, kl_ctl=0.0, **norm).algorithm
    got, _ = compute_advantages(config, batch_of_trajectories(rows), version=0, kl_coef=0.0)
    assert got["advantages"].abs().max() < 1e-6


@shows("rw_type")
def test_an_answer_is_scored_once_on_its_last_action():
    rows, _ = told()
    batch, _ = judged(disable_value=True, kl_ctl=0.0, gae_lambda=0.0, **RAW)
    earned = torch.split(batch["advantages"], list(batch.lengths))
    for row, column in zip(rows, earned, strict=True):
        assert column[:-2].abs().max() == 0.0  # with lambda 0 an action gets what it earns itself
        assert column[-2] == row.reward
    with pytest.raises(ValueError, match="rw_type=dense scores every token by a model"):
        experiment(rw_type="dense")


def test_turns_that_were_scored_are_dense_rewards():
    rows, _ = told()
    first, last = rows[0], rows[1]
    start = int(first.loss_mask.argmax())
    turns = (
        Turn(start, start + 2, "stop", reward=0.25),
        Turn(start + 2, first.num_tokens, "stop", reward=-1.5),
    )
    pair = [replace(first, turns=turns), last]
    batch = batch_of_trajectories(pair).with_columns(dense_scores=running_scores(pair))
    options = {"disable_value": True, "kl_ctl": 0.0, "gae_lambda": 0.0, **RAW}
    config = experiment(use_dense_reward=True, **options).algorithm
    got, _ = compute_advantages(config, batch, version=0, kl_coef=0.0)
    expected = torch.zeros(batch.num_tokens)
    expected[start] = 0.25  # the action of the turn's last token
    expected[first.num_tokens - 2] = -1.5
    expected[-2] = last.reward
    torch.testing.assert_close(got["advantages"], expected)


@shows("use_adaptive_kl_ctl", "adaptive_kl_target", "adaptive_kl_horizon")
def test_the_coefficient_rises_while_the_kl_is_above_its_target():
    config = experiment(
        kl_ctl=0.2, use_adaptive_kl_ctl=True, adaptive_kl_target=2.0, adaptive_kl_horizon=100
    ).algorithm
    kl = AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)
    expected = 0.2
    for seen, error in ((2.2, 0.1), (9.0, 0.2), (1.9, -0.05), (-3.0, -0.2)):
        expected *= 1 + error * 8 / 100
        kl.update(seen, 8)
        assert kl.coef == pytest.approx(expected)
    fixed = experiment(kl_ctl=0.2).algorithm
    assert (fixed.kl_target, fixed.kl_coef) == (None, 0.2)


# --- losses --------------------------------------------------------------------------------------


def updated(old: list[float], new: list[float], advantages: list[float]) -> SequenceBatch:
    logs = torch.tensor(old, dtype=torch.float64).log()
    return SequenceBatch(
        (len(old),),
        {
            "loss_mask": torch.ones(len(old), dtype=torch.bool),
            "advantages": torch.tensor(advantages, dtype=torch.float64),
            "behaviour_logprobs": logs,
            "proximal_logprobs": logs,
            "logprobs": torch.tensor(new, dtype=torch.float64).log().requires_grad_(),
        },
    )


def loss_of(batch: SequenceBatch, **ppo):
    loss, stats = policy_loss(experiment(**ppo).algorithm, batch, batch["logprobs"])
    return float(loss.detach()), stats


@shows("eps_clip", "c_clip")
def test_the_ratio_is_clipped_on_both_sides_and_where_it_costs_most():
    """By hand: ratios 2, 0.5, 4 and 1."""
    batch = updated([0.1, 0.2, 0.1, 0.3], [0.2, 0.1, 0.4, 0.3], [1.0, -1.0, -1.0, 3.0])
    free = {"early_stop_imp_ratio": None}
    assert loss_of(batch, **free)[0] == pytest.approx(-(1.2 - 0.8 - 4.0 + 3.0) / 4)
    assert loss_of(batch, eps_clip=0.4, **free)[0] == pytest.approx(-(1.4 - 0.6 - 4.0 + 3.0) / 4)
    assert loss_of(batch, c_clip=3.0, **free)[0] == pytest.approx(-(1.2 - 0.8 - 3.0 + 3.0) / 4)
    assert loss_of(batch)[1]["ratio"] == pytest.approx((2 + 0.5 + 4 + 1) / 4)


@shows("early_stop_imp_ratio", "early_stop_kl")
@pytest.mark.parametrize(
    ("options", "is_stopped"),
    [
        ({"early_stop_imp_ratio": 1.2}, True),
        ({"early_stop_imp_ratio": 1.25}, False),  # strictly above
        ({"early_stop_imp_ratio": None}, False),
        ({}, False),
        ({"early_stop_kl": 0.12}, True),
        ({"early_stop_kl": 0.13}, False),
    ],
    ids=str,
)
def test_a_micro_batch_that_is_too_far_gives_no_gradient(options, is_stopped):
    """By hand: ratios 2 and 0.5; k3 is r - 1 - ln r: 0.307 and 0.193 of two moved ones in four."""
    batch = updated([0.25, 0.25], [0.5, 0.125], [1.0, 1.0])
    quiet = updated([0.25] * 4, [0.5, 0.125, 0.25, 0.25], [1.0] * 4)
    batch = quiet if "early_stop_kl" in options else batch
    kl = ((1 - math.log(2)) + (-0.5 + math.log(2))) / len(batch["logprobs"])
    loss, stats = policy_loss(experiment(**options).algorithm, batch, batch["logprobs"])
    loss.backward()
    assert stats["update_kl"] == pytest.approx(kl)
    assert bool(batch["logprobs"].grad.abs().max() == 0) == is_stopped
    assert (loss.item() == 0.0) == is_stopped
    if options.get("early_stop_imp_ratio") is not None or options == {}:
        assert float(stats["stopped_fraction"]) == float(is_stopped)


def training_batch(config: PPOCodeExperiment) -> SequenceBatch:
    rows, columns = told()
    batch = batch_of_trajectories(rows).with_columns(
        values=columns["values"],
        normalized_values=columns["values"],
        reference_logprobs=columns["reference_logprobs"],
    )
    return compute_advantages(config.algorithm, batch, version=0, kl_coef=config.algorithm.kl_coef)[
        0
    ]


def steps_of(engine) -> int:
    (steps,) = {int(state["step"]) for state in bare(engine)._optimizer.state.values()}
    return steps


SPEC = MicroBatchSpec(40)


def test_a_stopped_step_moves_weights_by_momentum_alone(llama_dir):
    """The optimizer steps: from rest nothing moves, in motion Adam goes on."""
    optimizer = OPTIMIZER.model_copy(update={"weight_decay": 0.0})
    engine = open_engine(llama_dir, optimizer=optimizer)
    batch = training_batch(experiment())

    def step(bound: float | None) -> dict[str, float]:
        config = experiment(ppo_n_minibatches=1, early_stop_imp_ratio=bound).algorithm
        return PPOActor(engine, ALONE, config, SPEC, 1.0).train_step(batch)

    before = parameters_of(engine)
    metrics = step(1e-6)
    assert (metrics["stopped_fraction"], metrics["grad_norm"], steps_of(engine)) == (1.0, 0.0, 1)
    assert_close(parameters_of(engine), before, atol=0.0)
    assert "stopped_fraction" not in step(None)
    moving = parameters_of(engine)
    assert step(1e-6)["grad_norm"] == 0.0
    after = parameters_of(engine)
    assert any((after[name] - moving[name]).abs().max() > 1e-5 for name in moving)
    assert steps_of(engine) == 3


@shows("ppo_n_minibatches", "actor_sample_reuse", "critic_sample_reuse")
@pytest.mark.parametrize(
    ("options", "actor_steps", "critic_steps"),
    [
        ({}, 4, 4),
        ({"ppo_n_minibatches": 2}, 2, 2),
        ({"ppo_n_minibatches": 2, "actor_sample_reuse": 3}, 6, 2),
        ({"ppo_n_minibatches": 2, "critic_sample_reuse": 2}, 2, 4),
    ],
    ids=str,
)
def test_steps_are_mini_batches_times_epochs(llama_dir, options, actor_steps, critic_steps):
    config = experiment(early_stop_imp_ratio=None, **options)
    batch = training_batch(config)
    policy, values = open_engine(llama_dir), open_engine(llama_dir, head="value")
    PPOActor(policy, ALONE, config.algorithm, SPEC, 1.0).train_step(batch)
    count = config.algorithm.num_minibatches
    PPOCritic(values, ALONE, config.critic, SPEC, count).train_step(batch)
    assert (steps_of(policy), steps_of(values)) == (actor_steps, critic_steps)


def test_a_second_epoch_is_the_same_steps_once_more(llama_dir):
    """Judged once: the old logprobs and advantages stay, the policy moves on."""
    twice = experiment(early_stop_imp_ratio=None, ppo_n_minibatches=2, actor_sample_reuse=2)
    once = experiment(early_stop_imp_ratio=None, ppo_n_minibatches=2)
    batch = training_batch(once)
    engines = [open_engine(llama_dir) for _ in range(2)]
    PPOActor(engines[0], ALONE, twice.algorithm, SPEC, 1.0).train_step(batch)
    for _ in range(2):
        PPOActor(engines[1], ALONE, once.algorithm, SPEC, 1.0).train_step(batch)
    assert_close(parameters_of(engines[0]), parameters_of(engines[1]), atol=0.0)


# --- the critic ----------------------------------------------------------------------------------


@shows("value_eps_clip")
def test_values_move_within_their_clip():
    """By hand: from 0 to 0.9, wanted is 1. Moved by 0.2 at most, the value would be off by 0.8."""
    values, old, wanted = (torch.tensor([x]) for x in (0.9, 0.0, 1.0))
    for bound, loss in ((0.2, 0.8**2 / 2), (0.5, 0.5**2 / 2), (1.0, 0.1**2 / 2)):
        critic = experiment(value_eps_clip=bound).critic
        got, _ = value_losses(values, old, wanted, critic.eps_clip, critic.huber_delta)
        assert got.tolist() == pytest.approx([loss])
    assert experiment().critic.eps_clip == 0.2


def slow_statistics(batches, beta: float | None, eps: float = 0.0) -> tuple[float, float]:
    """Mean and spread after each batch was taken in."""
    mean = square = debias = count = 0.0
    for batch in batches:
        if beta is None:
            mean += math.fsum(batch)
            square += math.fsum(x * x for x in batch)
            count += len(batch)
            continue
        mean = beta * mean + (1 - beta) * math.fsum(batch) / len(batch)
        square = beta * square + (1 - beta) * math.fsum(x * x for x in batch) / len(batch)
        debias = beta * debias + 1 - beta
    weight = count if beta is None else max(debias, eps)
    mean, square = mean / weight, square / weight
    return mean, math.sqrt(max(square - mean**2, 0.01))


@shows("value_norm", "value_norm_type", "value_norm_beta", "value_norm_eps")
@pytest.mark.parametrize(
    ("options", "beta", "eps"),
    [
        ({}, 0.99995, 1e-5),
        ({"value_norm_beta": 0.9}, 0.9, 1e-5),
        ({"value_norm_beta": 0.9, "value_norm_eps": 0.4}, 0.9, 0.4),
        ({"value_norm_type": "ma"}, None, 0.0),
    ],
    ids=str,
)
def test_values_are_in_units_of_the_returns_so_far(options, beta, eps):
    normalizer = make_normalizer(experiment(**options).critic)
    # Nothing is known yet: a tenth of what the critic says.
    assert normalizer.denormalize(torch.tensor([3.0])).tolist() == pytest.approx([0.3])
    generator = torch.Generator().manual_seed(4)
    seen = []
    for _ in range(4):
        returns = 3 + 2 * torch.randn(9, generator=generator, dtype=torch.float64)
        mask = torch.rand(9, generator=generator) < 0.7
        normalizer.update(MaskedStatistics.of(returns, mask))
        seen.append(returns[mask].tolist())
        mean, std = slow_statistics(seen, beta, eps)
        assert (normalizer.mean, normalizer.std) == pytest.approx((mean, std), rel=1e-6)
        assert normalizer.normalize(torch.tensor([mean + 99.0])).tolist() == [5.0]
        assert float(normalizer.denormalize(torch.tensor(2.0))) == pytest.approx(2 * std + mean)


def test_without_value_norm_the_critic_speaks_in_units_of_the_rewards(llama_dir):
    config, engine = experiment(value_norm=False), open_engine(llama_dir, head="value")
    assert make_normalizer(config.critic) is None
    rows, _ = told()
    batch = batch_of_trajectories(rows)
    plain = PPOCritic(engine, ALONE, config.critic, SPEC).inference(batch)
    scaled = PPOCritic(engine, ALONE, experiment().critic, SPEC).inference(batch)
    assert torch.equal(plain["values"], plain["normalized_values"])
    torch.testing.assert_close(scaled["values"], 0.1 * plain["values"])


# --- answers, references, prompts ----------------------------------------------------------------


def group_of(row: int, scores: list[float], lengths: list[int]) -> TrajectoryGroup:
    rows = [
        Trajectory(
            rollout_id=f"run.{row}",
            group_id=f"row-{row}.{row}",
            sample_index=i,
            input_ids=np.arange(size + 2, dtype=np.int32),
            loss_mask=np.arange(size + 2) >= 2,
            logprobs=np.zeros(size + 2, np.float32),
            versions=np.zeros(size + 2, np.int32),
            reward=score,
            stop_reason="stop",
        )
        for i, (score, size) in enumerate(zip(scores, lengths, strict=True))
    ]
    return TrajectoryGroup(f"run.{row}", f"row-{row}.{row}", tuple(rows))


@shows("group_size", "generation_size")
def test_the_best_of_what_was_sampled_are_learned_from():
    config = experiment(group_size=2, generation_size=4)
    assert config.rollout.group_size == 4
    groups = (group_of(0, [1, 0, 1, 1], [5, 9, 7, 7]), group_of(1, [0, 0, 0, 0], [3, 8, 3, 3]))
    got = keep_best(TrajectoryBatch(groups), config.ppo.group_size)
    assert [row.sample_index for row in got.trajectories] == [2, 3, 0, 1]
    assert got.rollout_ids == ["run.0", "run.1"]
    # The service counts what it sampled, the trainer what it learns from.
    assert (config.batch_trajectories, config.trained_trajectories) == (32 * 4, 32 * 2)
    plain = experiment(group_size=3)
    assert (plain.rollout.group_size, plain.batch_trajectories) == (3, 96)


@shows("check_xml_format")
def test_a_wrong_answer_in_the_right_form_scores_more():
    formed, other = "<think>a < b</think> <answer>7</answer>", "7"
    checks = experiment(check_xml_format=True).ppo.check_xml_format
    scores = [answer_score(s, text, checks) for s in (1.0, 0.0) for text in (formed, other)]
    assert scores == [1.0, 1.0, -0.8, -1.0]
    plain = experiment().ppo.check_xml_format
    assert [answer_score(0.0, text, plain) for text in (formed, other)] == [-1.0, -1.0]


@shows("check_verifier_status")
def test_a_batch_of_the_lowest_rewards_is_the_verifiers_fault():
    assert not experiment().ppo.check_verifier_status
    ppo = experiment(
        check_verifier_status=True, reward_output_bias=0.5, reward_output_scaling=3.0
    ).ppo
    assert ppo.lowest_reward == -4.5
    with pytest.raises(RewardError, match=r"all 3 rewards of the batch are -4\.5"):
        check_verifier([-4.5, -4.5000001, -4.5], ppo.lowest_reward)
    check_verifier([-4.5, -4.5, 1.5], ppo.lowest_reward)
    check_verifier([-4.5] * 99 + [-3.9], ppo.lowest_reward)


@shows("ref_ema_eta")
@pytest.mark.parametrize(("eta", "expected"), [(None, 1.0), (0.0, 1.0), (0.25, 2.0), (1.0, 5.0)])
def test_the_reference_moves_its_share_of_the_way(eta, expected):
    followed = experiment(ref_ema_eta=eta).reference.ema_eta
    target, source = [torch.tensor([1.0])], [torch.tensor([5.0])]
    if followed is not None:  # else nobody moves it
        move_towards(target, source, followed)
    assert target[0].tolist() == [expected]


@shows("dataset_filter_threshold", "dataset_max_filter_percentage")
@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, []),
        ({"dataset_max_filter_percentage": 1.0}, []),
        ({"dataset_filter_threshold": 0.5, "dataset_max_filter_percentage": 0.2}, [3]),
        ({"dataset_filter_threshold": 0.5, "dataset_max_filter_percentage": 0.49}, [1, 3]),
        ({"dataset_filter_threshold": 0.5, "dataset_max_filter_percentage": 0.9}, [0, 1, 3]),
    ],
    ids=str,
)
def test_prompts_that_are_too_easy_leave_at_the_end_of_an_epoch(tmp_path, options, left):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p"}\n' * 5)
    config = experiment({"data": {"path": str(tmp_path / "rows.jsonl")}}, **options)
    ppo = config.ppo
    data = PromptData(config.data)
    rows = PromptFilter(data, ppo.dataset_filter_threshold, ppo.dataset_max_filter_percentage)
    position_of = {data.row_index(at): at for at in range(5)}
    scores = {0: [1.0, 0.5], 1: [0.8, 0.8], 2: [0.5, 0.5], 3: [1.0, 1.0]}  # 4 was never seen
    for row, values in scores.items():
        rows.observe([position_of[row]] * len(values), values)
    rows.take(0, 5)
    assert rows.active == [0, 1, 2, 3, 4]
    rows.take(5, 1)
    assert [row for row in range(5) if row not in rows.active] == left


@shows("rm_output_scaling", "reward_source")
def test_the_scale_of_a_reward_model_is_the_verifiers_unless_it_is_given():
    """More by numbers in `test_reward_role`."""
    options = {"reward_source": "model", "reward_output_scaling": 2.0}
    model = {"reward_model": {"path": "r"}}
    assert experiment(model, **options).ppo.model_output_scaling == 2.0
    assert experiment(model, rm_output_scaling=3.0, **options).ppo.model_output_scaling == 3.0
    assert experiment().ppo.reward_source == "verifier"


@shows("force_no_logits_mask")
def test_logprobs_are_over_the_tokens_that_could_be_drawn_unless_told_otherwise():
    """By numbers in `test_sampling_mask`."""
    assert experiment().algorithm.sampling_mask == "replay"
    assert experiment(force_no_logits_mask=True).algorithm.sampling_mask == "ignore"


def test_prompts_are_filled_in_front_by_their_last_token(tmp_path):
    assert filled_prompts([[5, 6], [7], [1, 2, 3]], 3) == [[6, 5, 6], [7, 7, 7], [1, 2, 3]]
    task.write_model(tmp_path, {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1})
    rows = [{"prompt": "12"}, {"prompt": "345"}, {"prompt": "1234567"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    sections = {
        "model": {"path": str(tmp_path)},
        "data": {"path": str(tmp_path / "rows.jsonl"), "shuffle": False},
    }
    plain, filled = (
        {"max_prompt_tokens": 5, "fill_to_max_length": is_filled} for is_filled in (0, 1)
    )
    for rollout in (plain, filled):
        config = experiment(sections | {"rollout": rollout})
        data = PromptData(config.data)
        kept = make_prompt_filter(config, data)
        assert kept.active == [0, 1], "longer ones are left out"
        prompts = [data.prompt(at, 1) for at in kept.active]
        if rollout is plain:
            assert [prompt.text for prompt in prompts] == ["12", "345"]
            continue
        encoded = Encoder(str(tmp_path)).prompts(data, chat=False)
        for prompt, ids in zip(prompts, encoded, strict=False):
            assert prompt.input_ids == (ids[-1],) * (5 - len(ids)) + tuple(ids)
            assert prompt.data["prompt"] in ("12", "345"), "the verifier reads the row as it is"
    with pytest.raises(ValueError, match=r"rollout\.max_prompt_tokens"):
        experiment({"rollout": {"fill_to_max_length": True}})


def test_every_field_is_shown_by_numbers():
    assert set(PPOCodeConfig.model_fields) == SHOWN
