"""A step of PPO with critic, reference and teacher against the same step written with slow loops."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.numeric.engines import assert_close, bare, parameters_of
from tests.numeric.models import load_reference, reference_logits, save_model
from tests.numeric.policies import TEMPERATURE, batch_of, experiment, open_models, train
from tests.numeric.test_losses import slow_decoupled_loss
from trainer.algorithms.kl import AdaptiveKL
from trainer.models import CRITIC, POLICY, REFERENCE

KL_COEF, GAMMA, LAMBDA = 0.3, 0.97, 0.8
TOP_K = 5
KL = {"kl_in": "reward", "kl_coef": KL_COEF, "kl_estimator": "k1"}


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory) -> Path:
    """A model with other weights."""
    return save_model(tmp_path_factory.mktemp("other"), "llama", seed=1)


@torch.no_grad()
def logprobs_of(model, row) -> list[float]:
    """Of tokens 1.. of a row."""
    ids = row.input_ids.tolist()
    table = torch.log_softmax(reference_logits(model, ids).double() / TEMPERATURE, dim=-1)
    return [float(table[t, ids[t + 1]]) for t in range(len(ids) - 1)]


@torch.no_grad()
def values_of(models, folder, row) -> list[float]:
    """Of every state of a row, by the critic's fresh head on the stored body."""
    head = parameters_of(models.checkpoint_contents.models[CRITIC])["score.weight"].double()
    body = load_reference(folder).base_model
    hidden = body(input_ids=torch.tensor(row.input_ids)[None].long(), use_cache=False)
    return (hidden.last_hidden_state[0].double() @ head.T)[:, 0].tolist()


def slow_gae(rewards, values, mask, is_truncated):
    """One sequence, from the right; steps are the actions only."""
    result, following, last = [0.0] * len(mask), values[-1] if is_truncated else 0.0, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            last = rewards[t] + GAMMA * following - values[t] + GAMMA * LAMBDA * last
            result[t], following = last, values[t]
    return result


def slow_columns(models, folder, reference_dir, rows):
    """Per action of the batch: policy, behaviour, advantage before normalisation, return, value, KL."""
    policy, reference = load_reference(folder), load_reference(reference_dir)
    actions = []
    for row in rows:
        current, far = logprobs_of(policy, row), logprobs_of(reference, row)
        values = values_of(models, folder, row)
        mask = [bool(m) for m in row.loss_mask[1:]] + [False]
        kl = [max(-10.0, min(10.0, c - f)) for c, f in zip(current, far, strict=True)]
        rewards = [-KL_COEF * k for k in kl] + [0.0]
        rewards[max(t for t, m in enumerate(mask) if m)] += row.reward
        gains = slow_gae(rewards, values, mask, row.stop_reason == "length")
        for t in range(len(mask) - 1):
            if mask[t]:
                behaviour = float(row.logprobs[t + 1])
                told = gains[t] + values[t]
                actions.append((current[t], behaviour, gains[t], told, values[t], kl[t]))
    return [list(column) for column in zip(*actions, strict=True)]


def mean_and_variance(values):
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((v - mean) ** 2 for v in values) / len(values)


@pytest.mark.parametrize("normalization", ["none", "cumulative", "exponential"])
def test_the_figures_of_a_step_are_those_of_the_slow_loops(llama_dir, other_dir, normalization):
    config = experiment(
        llama_dir,
        algorithm={**KL, "discount": GAMMA, "advantage": {"gae_lambda": LAMBDA}},
        critic={"normalization": normalization},
        reference={"path": str(other_dir)},
    )
    models, rows = open_models(config), batch_of(0)
    columns = slow_columns(models, llama_dir, other_dir, rows)
    current, behaviour, gains, returns, values, kl = columns
    metrics = models.learner.train_step(rows, version=0)

    mean, variance = mean_and_variance(gains)
    advantages = [(gain - mean) / (math.sqrt(variance) + 1e-5) for gain in gains]
    in_loss = [True] * len(gains)
    loss = slow_decoupled_loss(current, current, behaviour, advantages, in_loss, cap=5.0)
    assert metrics["loss"] == pytest.approx(loss, rel=2e-3, abs=1e-4)

    centre, spread = mean_and_variance(returns)
    targets = returns
    if normalization != "none":
        targets = [max(-5.0, min(5.0, (r - centre) / math.sqrt(spread))) for r in returns]
    errors = [(v - target) ** 2 / 2 for v, target in zip(values, targets, strict=True)]
    assert metrics["value_loss"] == pytest.approx(math.fsum(errors) / len(errors), rel=1e-3)
    _, unexplained = mean_and_variance([r - v for r, v in zip(returns, values, strict=True)])
    assert metrics["explained_variance"] == pytest.approx(1 - unexplained / spread, rel=1e-3)
    assert metrics["return_mean"] == pytest.approx(centre, rel=1e-4)
    assert metrics["value_mean"] == pytest.approx(math.fsum(values) / len(values), rel=1e-4)
    assert metrics["reference_kl"] == pytest.approx(math.fsum(kl) / len(kl), rel=1e-4)
    assert metrics["kl_coef"] == KL_COEF
    assert metrics["value_clip_fraction"] == metrics["clip_fraction"] == 0.0  # nothing moved yet


def test_values_are_denormalised_with_what_was_known_before_their_batch(llama_dir):
    """By hand: a head of zeros says the mean of the returns so far, which is 0 at first."""
    config = experiment(llama_dir, critic={"normalization": "cumulative"})
    models = open_models(config)
    critic = bare(models.checkpoint_contents.models[CRITIC])
    with torch.no_grad():
        critic._model.model.score.weight.zero_()
    critic._optimizer.param_groups[0]["lr"] = 0.0
    critic._scheduler.base_lrs = [0.0]
    first, second = train(models, range(2))
    assert first["value_mean"] == 0.0
    assert second["value_mean"] == pytest.approx(first["return_mean"], rel=1e-5)


def test_while_the_critic_warms_up_it_alone_learns(llama_dir):
    models = open_models(experiment(llama_dir, critic={"warmup_steps": 2}))
    policy, critic = models.policy, models.checkpoint_contents.models[CRITIC]
    before, values = parameters_of(policy), parameters_of(critic)
    metrics = train(models, range(3))
    assert ["loss" in step for step in metrics] == [False, False, True]
    assert all(step["critic_grad_norm"] > 0.0 for step in metrics)
    assert not torch.equal(parameters_of(critic)["score.weight"], values["score.weight"])
    again = open_models(experiment(llama_dir, critic={"warmup_steps": 2}))
    train(again, range(2))
    assert_close(parameters_of(again.policy), before, atol=0.0)
    assert [metrics[n]["critic_lr"] for n in range(3)] == pytest.approx([1e-3, 9e-4, 8e-4])
    assert metrics[2]["lr"] == pytest.approx(
        1e-3
    )  # its schedule begins with it, and ends at its end
    assert bare(again.policy)._trainer_config.total_steps == 8
    assert any((parameters_of(policy)[n] != before[n]).any() for n in before)


def test_an_adaptive_coefficient_is_used_and_then_moved_towards_its_target(llama_dir, other_dir):
    # Far below what the reference is away; k2 is never negative.
    adaptive = KL | {"kl_estimator": "k2", "kl_target": 1e-3, "kl_horizon": 120}
    config = experiment(llama_dir, algorithm=adaptive, reference={"path": str(other_dir)})
    metrics = train(open_models(config), range(3))
    factor = 1 + 0.2 * len(batch_of(0)) / 120
    assert [step["kl_coef"] for step in metrics] == pytest.approx(
        [KL_COEF * factor**step for step in range(3)]
    )
    assert isinstance(open_models(config).checkpoint_contents.states["kl"], AdaptiveKL)


def test_a_teacher_alone_is_learned_from(llama_dir, other_dir):
    config = experiment(
        llama_dir,
        "grpo",
        algorithm={"distillation_coef": 1.0, "reward_scaling": 0.0, "num_minibatches": 4},
        teacher={"path": str(other_dir)},
    )
    models, rows = open_models(config), batch_of(0)
    metrics = [models.learner.train_step(rows, version=0) for _ in range(8)]
    policy, teacher = load_reference(llama_dir), load_reference(other_dir)
    gaps = [
        current - told
        for row in rows
        for current, told, is_in in zip(
            logprobs_of(policy, row), logprobs_of(teacher, row), row.loss_mask[1:], strict=True
        )
        if is_in
    ]
    assert metrics[0]["teacher_kl"] == pytest.approx(math.fsum(gaps) / len(gaps), rel=1e-4)
    assert metrics[-1]["teacher_kl"] < metrics[0]["teacher_kl"] - 0.05


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_the_top_of_a_teacher_is_learned_from(llama_dir, other_dir, divergence):
    algorithm = {
        "distillation_coef": 1.0,
        "distillation_top_k": TOP_K,
        "distillation_divergence": divergence,
        "reward_scaling": 0.0,
    }
    config = experiment(llama_dir, "grpo", algorithm=algorithm, teacher={"path": str(other_dir)})
    models, rows = open_models(config), batch_of(0)
    metrics = [models.learner.train_step(rows, version=0) for _ in range(8)]
    policy, teacher = load_reference(llama_dir), load_reference(other_dir)
    gaps = [
        gap
        for row in rows
        for gap, is_in in zip(
            top_gaps(policy, teacher, row, divergence), row.loss_mask[1:], strict=True
        )
        if is_in
    ]
    assert metrics[0]["teacher_kl"] == pytest.approx(math.fsum(gaps) / len(gaps), rel=1e-4)
    assert metrics[-1]["teacher_kl"] < 0.9 * metrics[0]["teacher_kl"]


@torch.no_grad()
def top_gaps(policy, teacher, row, divergence) -> list[float]:
    """Divergence at tokens 1.. of a row, over the likeliest tokens of the teacher and the rest."""
    ids = row.input_ids.tolist()
    tables = [
        torch.softmax(reference_logits(model, ids).double() / TEMPERATURE, dim=-1)
        for model in (policy, teacher)
    ]
    gaps = []
    for t in range(len(ids) - 1):
        ours, theirs = (table[t].tolist() for table in tables)
        top = sorted(range(len(theirs)), key=lambda token: -theirs[token])[:TOP_K]
        p, q = ([each[token] for token in top] for each in (ours, theirs))
        p, q = ([*each, 1.0 - math.fsum(each)] for each in (p, q))
        if divergence == "forward":
            p, q = q, p
        gaps.append(math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    return gaps


@pytest.mark.parametrize("eta", [0.25, 1.0])
def test_a_reference_follows_the_policy_by_its_share(llama_dir, eta):
    config = experiment(llama_dir, "grpo", algorithm={"kl_coef": 0.1}, reference={"ema_eta": eta})
    models = open_models(config)
    expected = parameters_of(models.policy)
    for step in range(3):
        train(models, range(step, step + 1))
        policy = parameters_of(models.policy)
        expected = {n: eta * policy[n] + (1 - eta) * expected[n] for n in expected}
    got = parameters_of(models.checkpoint_contents.followers[REFERENCE])
    assert_close(got, expected, atol=1e-6)
    assert any(
        (got[n] - parameters_of(open_models(config).policy)[n]).abs().max() > 1e-4 for n in got
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_reference_of_an_adapter_is_the_model_below_it(llama_dir):
    """One model in memory, and the numbers of two."""
    lora = {"rank": 4, "alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    algorithm = {"kl_coef": 0.5, "kl_estimator": "k2"}
    model = {"path": str(llama_dir), "lora": lora}
    alone = open_models(experiment(llama_dir, "grpo", model=model, algorithm=algorithm))
    apart = {"path": str(llama_dir)}
    copied = open_models(
        experiment(llama_dir, "grpo", model=model, algorithm=algorithm, reference=apart)
    )
    assert not alone._frozen and copied._frozen
    one, two = train(alone, range(3)), train(copied, range(3))
    assert [step["reference_kl"] for step in one] == pytest.approx(
        [step["reference_kl"] for step in two], rel=1e-5, abs=1e-9
    )
    assert one[0]["reference_kl"] < 1e-9 < one[2]["reference_kl"]
    assert_close(parameters_of(alone.policy), parameters_of(copied.policy), atol=1e-6)


def test_the_parts_of_a_checkpoint_are_what_learns(llama_dir):
    plain = open_models(experiment(llama_dir, "grpo"))
    assert (list(plain.checkpoint_contents.models), dict(plain.checkpoint_contents.followers)) == (
        [POLICY],
        {},
    )
    assert dict(plain.checkpoint_contents.states) == {}
    full = open_models(
        experiment(
            llama_dir,
            algorithm=KL | {"kl_target": 0.1},
            critic={"normalization": "exponential"},
            reference={"ema_eta": 0.1},
        )
    )
    assert list(full.checkpoint_contents.models) == [POLICY, CRITIC]
    assert list(full.checkpoint_contents.followers) == [REFERENCE]
    assert set(full.checkpoint_contents.states) == {"value_normalizer", "kl"}
