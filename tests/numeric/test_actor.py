"""The actor's step against the same step written with slow loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.types import Trajectory
from tests.numeric.engines import (
    GRAD_NORM,
    assert_close,
    assert_same_figures,
    open_engine,
    parameters_of,
)
from tests.numeric.models import load_reference, reference_logits
from tests.numeric.policies import TEMPERATURE, learner_with, trajectory
from tests.numeric.test_advantages import slow_advantages
from tests.numeric.test_losses import slow_decoupled_loss
from trainer.algorithms.batch_advantages import compute_advantages
from trainer.api import MicroBatchSpec
from trainer.batching.sequences import batch_of_trajectories
from trainer.interfaces.advantages import AdvantagesCall
from trainer.interfaces.frozen_model import FrozenModel
from trainer.interfaces.ppo_actor import PPOActor
from trainer.learner import Learner
from trainer.topology import Topology

TOPOLOGY = Topology(0, 1, torch.device("cpu"))


def learner_of(engine, config: AlgorithmConfig, budget: int, reference=None) -> Learner:
    """A policy without a critic; the reference is an engine."""
    spec = MicroBatchSpec(budget)
    actor = PPOActor(engine, TOPOLOGY, config, spec, TEMPERATURE)
    interfaces = {"actor_inf": actor, "advantages": AdvantagesCall(config), "actor_train": actor}
    if reference is not None:
        model = FrozenModel(reference, TOPOLOGY, spec, TEMPERATURE, "reference_logprobs")
        interfaces["ref_inf"] = model
    return learner_with(config, interfaces)


@pytest.fixture
def trajectories():
    names = ["a", "a", "a", "b", "b", "c", "c", "c", "c"]
    return [trajectory(i, name, names[:i].count(name)) for i, name in enumerate(names)]


@torch.no_grad()
def token_logprobs_of(model, row: Trajectory) -> list[float]:
    """Temperature-scaled logprob of tokens 1.. of a row under a model, in float64."""
    ids = row.input_ids.tolist()
    table = torch.log_softmax(reference_logits(model, ids).double() / TEMPERATURE, dim=-1)
    return [float(table[t, ids[t + 1]]) for t in range(len(ids) - 1)]


def slow_loss(model, rows, config: AlgorithmConfig) -> float:
    """The loss before the first update, when current = proximal where it is decoupled."""
    rewards = [
        max(-config.reward_clip, min(config.reward_clip, r))
        for r in ((row.reward + config.reward_bias) * config.reward_scaling for row in rows)
    ]
    groups = [ord(row.rollout_id) for row in rows]
    advantages = slow_advantages(rewards, groups, config.advantage.std_level == "group")
    columns = [[], [], [], [], []]
    for row, advantage in zip(rows, advantages, strict=True):
        current = token_logprobs_of(model, row)
        behaviour = row.logprobs.tolist()[1:]
        proximal = current if config.decoupled else behaviour
        is_in = not (config.mask_truncated and row.stop_reason == "length")
        mask = [bool(m) and is_in for m in row.loss_mask[1:]]
        values = (current, proximal, behaviour, [advantage] * len(mask), mask)
        for column, value in zip(columns, values, strict=True):
            column.extend(value)
    cap = config.behaviour_weight_cap if config.decoupled else None
    bounds = config.policy_loss
    high = bounds.eps_clip if bounds.eps_clip_higher is None else bounds.eps_clip_higher
    return slow_decoupled_loss(*columns, low=bounds.eps_clip, high=high, cap=cap)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"behaviour_weight_cap": None},
        {"decoupled": False, "policy_loss": {"eps_clip_higher": 0.28}},
        {"advantage": {"std_level": "none"}},
        {"mask_truncated": True},
        {"reward_bias": -0.5, "reward_scaling": 10.0, "reward_clip": 6.0},
    ],
)
@pytest.mark.parametrize("budget", [16, 10_000])
def test_the_loss_of_a_step_is_that_of_the_slow_loops(llama_dir, trajectories, options, budget):
    config = AlgorithmConfig(**options)
    engine = open_engine(llama_dir)
    metrics = learner_of(engine, config, budget).train_step(trajectories, 0)
    expected = slow_loss(load_reference(llama_dir), trajectories, config)
    assert metrics["loss"] == pytest.approx(expected, rel=2e-3, abs=1e-4)
    assert math.isfinite(metrics["grad_norm"])
    if config.decoupled:
        assert metrics["clip_fraction"] == 0.0  # nothing has moved yet


@pytest.mark.parametrize(
    "options",
    [
        {"aggregation": "sequence_mean_token_mean", "ratio_level": "sequence"},
        {"aggregation": "sequence_mean_token_sum_norm", "aggregation_max_tokens": 16},
        {"m2_threshold": 0.5, "policy_loss": {"type": "unclipped"}},
        {"proximal": "loglinear"},
        {"rejection": {"upper": 1.5}, "behaviour_weight_action": "clamp"},
        {
            "advantage": {"type": "reward"},
            "advantage_norm": "batch",
            "discount": 0.9,
            "zero_truncated": True,
        },
        {
            "policy_loss": {"type": "cispo"},
            "entropy_coef": 0.01,
            "advantage": {"leave_one_out": True},
        },
        {
            "policy_loss": {"type": "sapo"},
            "decoupled": False,
            "advantage": {"std_level": "batch"},
        },
        {"overlong": {"max_tokens": 12, "buffer_tokens": 6}, "mask_truncated": True},
        {"kl_coef": 0.1},
        {"kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k1"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_step_does_not_depend_on_the_split_into_micro_batches(llama_dir, trajectories, options):
    config, metrics, parameters = AlgorithmConfig(**options), [], []
    for budget in (16, 10_000):
        engine, reference = open_engine(llama_dir), open_engine(llama_dir)
        learner = learner_of(engine, config, budget, reference if config.kl_coef else None)
        metrics.append(learner.train_step(trajectories, 0))
        parameters.append(parameters_of(engine))
    assert_same_figures(*metrics, grad_norm=GRAD_NORM)
    assert_close(*parameters, atol=1e-6)
    assert metrics[0]["grad_norm"] > 0.0


def gaps_of(model, trajectories):
    """Of each token in the loss: its logprob now, less that of the server."""
    return [
        current - behaviour
        for row in trajectories
        for current, behaviour, is_in in zip(
            token_logprobs_of(model, row),
            row.logprobs.tolist()[1:],
            row.loss_mask[1:],
            strict=True,
        )
        if is_in
    ]


def test_the_distance_from_the_servers_policy_is_that_of_the_slow_loop(llama_dir, trajectories):
    model = load_reference(llama_dir)
    gaps = gaps_of(model, trajectories)
    weights = [math.exp(gap) for gap in gaps]
    config = AlgorithmConfig(num_minibatches=3)
    metrics = learner_of(open_engine(llama_dir), config, 64).train_step(trajectories, 0)
    assert metrics["logprob_diff_mean"] == pytest.approx(
        math.fsum(map(abs, gaps)) / len(gaps), rel=1e-4
    )
    assert metrics["logprob_diff_max"] == pytest.approx(max(map(abs, gaps)), rel=1e-4)
    share = math.fsum(weights) ** 2 / math.fsum(w * w for w in weights) / len(weights)
    assert metrics["effective_sample_size"] == pytest.approx(share, rel=1e-3)


def test_the_entropy_without_a_bonus_is_that_of_the_first_policy(llama_dir, trajectories):
    model, entropies = load_reference(llama_dir), []
    for row in trajectories:
        with torch.no_grad():
            logits = reference_logits(model, row.input_ids.tolist()).double() / TEMPERATURE
        table = torch.log_softmax(logits, dim=-1)
        for t in range(row.num_tokens - 1):
            if row.loss_mask[t + 1]:
                entropies.append(-math.fsum(math.exp(p) * p for p in table[t].tolist()))
    mean = math.fsum(entropies) / len(entropies)
    for config in (AlgorithmConfig(num_minibatches=3), AlgorithmConfig(entropy_coef=0.01)):
        metrics = learner_of(open_engine(llama_dir), config, 16).train_step(trajectories, 0)
        assert metrics["entropy"] == pytest.approx(mean, rel=1e-4)


def test_a_version_of_one_update_makes_no_forward_but_its_own(llama_dir, trajectories):
    engine, seen = open_engine(llama_dir), []
    engine.forward = lambda *args, **options: seen.append(args)
    learner_of(engine, AlgorithmConfig(), 10_000).train_step(trajectories, 0)
    assert not seen


def test_an_interpolated_proximal_needs_no_forward(llama_dir, trajectories):
    """Tokens of version 0 at version 1: half way between the server's logprob and the current one."""
    config = AlgorithmConfig(proximal="loglinear", behaviour_weight_cap=None)
    engine, seen = open_engine(llama_dir), []
    model = load_reference(llama_dir)
    engine.forward = lambda *args, **options: seen.append(args)
    metrics = learner_of(engine, config, 10_000).train_step(trajectories, version=1)
    gaps = [gap / 2 for gap in gaps_of(model, trajectories)]
    weights = [math.exp(gap) for gap in gaps]
    assert not seen
    assert metrics["behaviour_weight"] == pytest.approx(math.fsum(weights) / len(gaps), rel=1e-4)
    assert "logprob_diff_mean" not in metrics


def test_the_penalty_is_of_the_distance_from_the_reference(llama_dir, trajectories):
    """A reference whose every logprob is 0.5 lower: k2 is 1/8 on each token."""
    engine = open_engine(llama_dir)

    class Lower:
        """The engine's own model, a little less sure."""

        def forward(self, *args, **options):
            return engine.forward(*args, **options) - 0.5

    config = AlgorithmConfig(kl_coef=2.0, kl_estimator="k2")
    metrics = learner_of(engine, config, 10_000, Lower()).train_step(trajectories, 0)
    assert metrics["reference_kl"] == pytest.approx(0.125, rel=1e-4)
    plain = learner_of(open_engine(llama_dir), AlgorithmConfig(), 10_000)
    assert metrics["loss"] - plain.train_step(trajectories, 0)["loss"] == pytest.approx(
        0.25, rel=1e-3
    )


def test_mini_batches_hold_whole_groups_and_take_their_proximal_from_before_the_first_update(
    llama_dir, trajectories
):
    config = AlgorithmConfig(num_minibatches=3)
    engine = open_engine(llama_dir)
    before = load_reference(llama_dir)
    seen = []
    train_batch = engine.train_batch

    class Watching:
        """The engine, noting what it is asked to train on."""

        forward = engine.forward

        def train_batch(self, batch, *args):
            seen.append(batch)
            return train_batch(batch, *args)

    learner_of(Watching(), config, 10_000).train_step(trajectories, 0)
    members = [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
    assert [set(batch["group"].tolist()) for batch in seen] == [{0}, {3}, {5}]
    assert [len(batch.lengths) for batch in seen] == [3, 2, 4]
    for batch, group in zip(seen, members, strict=True):
        columns = (batch["proximal_logprobs"], batch["loss_mask"])
        pieces = (torch.split(column, list(batch.lengths)) for column in columns)
        for piece, mask, index in zip(*pieces, group, strict=True):
            expected = torch.tensor(token_logprobs_of(before, trajectories[index])).float()
            assert mask.any()
            expected = torch.where(mask[:-1], expected, 0.0)
            torch.testing.assert_close(piece[:-1], expected, atol=1e-4, rtol=0)


def test_branches_of_a_sample_share_its_advantage_and_count_once(llama_dir, trajectories):
    a, b, c = trajectories[:3]  # rewards and advantages of three samples, the first in two branches
    forked = replace(trajectories[5], rollout_id="a", sample_index=0, branch=1, reward=a.reward)
    seen = advantages_of(llama_dir, [a, forked, b, c])
    alone = advantages_of(llama_dir, [a, b, c])
    assert seen == [alone[0], alone[0], alone[1], alone[2]]
    assert len(set(alone)) == 3


def advantages_of(folder, rows) -> list[float]:
    """One per trajectory, as the actor hands them to its engine."""
    engine = open_engine(folder)
    seen = []
    engine.train_batch = lambda batch, *args: seen.append(batch) or {}
    learner_of(engine, AlgorithmConfig(), 10_000).train_step(rows, 0)
    (batch,) = seen
    pieces = torch.split(batch["advantages"], list(batch.lengths))
    assert all((piece == piece[0]).all() for piece in pieces)
    return [float(piece[0]) for piece in pieces]


def test_groups_of_equal_rewards_move_nothing(llama_dir, trajectories):
    equal = [
        Trajectory(**{f: getattr(t, f) for f in t.__slots__} | {"reward": 0.3})
        for t in trajectories
    ]
    engine = open_engine(llama_dir)
    metrics = learner_of(engine, AlgorithmConfig(), 64).train_step(equal, 0)
    assert metrics["loss"] == 0.0
    assert metrics["grad_norm"] == 0.0
    reference = dict(load_reference(llama_dir).named_parameters())
    # Weight decay alone: p · (1 - lr · decay).
    decayed = {name: p.detach() * (1 - 1e-3 * 0.1) for name, p in reference.items()}
    assert_close(parameters_of(engine), decayed, atol=1e-6)


ONE_UPDATE_RECIPES = {
    "token_mean": {},
    "token_mean_capped": {"behaviour_weight_cap": 1.05},
    "sequence_ratio": {"ratio_level": "sequence", "behaviour_weight_level": "geometric"},
    "rejection": {"rejection": {"upper": 1.2}},
    "bonus": {"entropy_coef": 0.01},
}


@pytest.mark.parametrize("name", ONE_UPDATE_RECIPES)
@pytest.mark.parametrize("budget", [16, 10_000])
def test_the_only_update_of_a_version_needs_no_forward_before(
    llama_dir, trajectories, name, budget
):
    """Its own says the same: weights and figures are those of a step whose policy was asked before."""
    config = AlgorithmConfig(**ONE_UPDATE_RECIPES[name])
    metrics, parameters = [], []
    for is_asked in (False, True):
        engine = open_engine(llama_dir)
        actor = PPOActor(engine, TOPOLOGY, config, MicroBatchSpec(budget), TEMPERATURE)
        batch = batch_of_trajectories(trajectories)
        told = actor.inference(batch) if is_asked else {}
        judged, seen = compute_advantages(config, batch.with_columns(**told), 0, 0.0)
        metrics.append(seen | actor.train_step(judged))
        parameters.append(parameters_of(engine))
    assert "effective_sample_size" in metrics[0]
    assert_same_figures(*metrics, grad_norm=GRAD_NORM)
    assert_close(*parameters, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "is_asked"),
    [
        ({}, False),
        ({"decoupled": False}, False),
        ({"proximal": "loglinear"}, False),
        ({"num_minibatches": 2}, True),
        ({"num_epochs": 2}, True),
        ({"m2_threshold": 0.1}, True),
        ({"distillation_coef": 0.1}, True),
        ({"kl_in": "reward", "kl_coef": 0.1}, True),
    ],
)
def test_the_policy_is_asked_first_where_that_is_read_before_or_between_updates(options, is_asked):
    assert AlgorithmConfig(**options).has_proximal_pass is is_asked
