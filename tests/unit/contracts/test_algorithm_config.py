"""Fields of an algorithm are honoured or refused: choices that would be without effect do not load."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.critic import CriticConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "sequence_mean_token_sum_norm"}, "aggregation_max_tokens; set it"),
        ({"aggregation_max_tokens": 8}, "belongs to aggregation"),
        ({"policy_loss": {"type": "unclipped", "eps_clip": 0.3}}, "eps_clip"),
        ({"policy_loss": {"type": "sapo", "dual_clip": 0.3}, "decoupled": False}, "dual_clip"),
        ({"policy_loss": {"type": "cispo", "dual_clip": 3.0}}, "dual_clip"),
        ({"policy_loss": {"temperature_positive": 2.0}}, "temperature_positive"),
        ({"policy_loss": {"type": "sapo"}}, "policy_loss.type=sapo .* set decoupled=false"),
        ({"policy_loss": {"type": "dppo"}}, "policy_loss.type=dppo .* set decoupled=false"),
        (
            {"policy_loss": {"type": "gmpo"}, "ratio_level": "sequence"},
            "type=gmpo reads no ratio of sequences; set ratio_level=token",
        ),
        (
            {"policy_loss": {"type": "reinforce"}, "ratio_level": "sequence"},
            "type=reinforce reads no ratio",
        ),
        (
            {"policy_loss": {"type": "clip_cov", "covariance_lower": 5.0}},
            "covariance_lower=5.0 is not below covariance_upper=5.0",
        ),
        ({"policy_loss": {"type": "clop"}}, "'clip', 'unclipped'"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "kl_straight_through"),
        ({"advantage": {"std_level": "none", "unbiased_std": False}}, "unbiased_std=false divides"),
        ({"advantage": {"type": "opo", "std_level": "batch"}}, "std_level"),
        ({"advantage": {"type": "reward", "mean_level": "batch"}}, "mean_level"),
        ({"decoupled": False, "behaviour_weight_floor": 0.5}, "behaviour_weight_floor: without"),
        ({"decoupled": False, "behaviour_weight_action": "clamp"}, "behaviour_weight_action: wi"),
        ({"decoupled": False, "behaviour_weight_level": "geometric"}, "weight_level: without"),
        ({"decoupled": False, "rejection": {"upper": 2.0}}, "rejection: without"),
        ({"decoupled": False, "m2_threshold": 0.1}, "m2_threshold: without"),
        ({"decoupled": False, "proximal": "loglinear"}, "proximal: without"),
        (
            {"proximal": "loglinear", "m2_threshold": 0.1},
            "m2_threshold: look at a batch .*recompute",
        ),
        ({"proximal": "linear", "behaviour_weight_normalize": True}, "normalize: look at a batch"),
        ({"proximal": "linear", "policy_loss": {"type": "kl_cov"}}, "type=kl_cov: look at a batch"),
        ({"decoupled": False, "behaviour_weight_normalize": True}, "weight_normalize: without"),
        ({"kl_bound": 5.0}, "kl_bound bounds nothing while kl_coef=0"),
        ({"kl_bias_correction": True}, "weighs the penalty in the loss"),
        (
            {"kl_bias_correction": True, "kl_coef": 0.1, "kl_in": "reward"},
            "weighs the penalty in the loss",
        ),
        (
            {"kl_bias_correction": True, "kl_coef": 0.1, "kl_straight_through": True},
            "leave out kl_straight_through",
        ),
        ({"zero_truncated": True, "truncated_reward_scale": 0.5}, "leave one out"),
        (
            {"dense_rewards": "gain", "advantage": {"type": "reward"}, "length_penalty": {}},
            "length_penalty: shape the score",
        ),
        ({"behaviour_weight_floor": 6.0}, "exceeds behaviour_weight_cap"),
        ({"behaviour_weight_action": "clamp", "behaviour_weight_cap": None}, "needs behaviour"),
        ({"rejection": {}}, "rejects nothing"),
        ({"rejection": {"lower": 2.0, "upper": 1.0}}, "exceeds upper"),
        ({"rejection": {"level": "token", "statistic": "max", "upper": 1.0}}, "of sequences"),
        ({"kl_in": "reward"}, "set kl_coef above 0"),
        (
            {"kl_in": "reward", "kl_coef": 0.1, "kl_straight_through": True},
            "a penalty in the reward has none",
        ),
        ({"kl_coef": 0.1, "kl_target": 1.0}, "set kl_in=reward"),
        ({"kl_horizon": 100}, "kl_horizon belongs to kl_target"),
        ({"overlong": {"max_tokens": 4, "buffer_tokens": 5}}, "exceeds max_tokens"),
        ({"dense_rewards": "gain"}, "advantage.type=grpo compares whole trajectories"),
        (
            {"dense_rewards": "gain", "advantage": {"type": "reward"}, "zero_truncated": True},
            "zero_truncated: shape the score of a trajectory",
        ),
        (
            {"dense_rewards": "score", "advantage": {"type": "reward"}, "reward_bias": 1.0},
            "reward_bias: shape the score of a trajectory",
        ),
    ],
)
def test_a_choice_without_effect_is_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig.model_validate(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 0.9}, "decay=0.9 belongs to normalization=exponential, not none"),
        (
            {"normalization_eps": 0.1, "normalization": "cumulative"},
            "normalization_eps=0.1 belongs to normalization=exponential, not cumulative",
        ),
        (
            {"initial_std": 0.1},
            "initial_std=0.1 belongs to normalization=exponential or cumulative",
        ),
    ],
)
def test_a_critic_that_normalises_nothing_refuses_how(options, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        CriticConfig.model_validate(options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decoupled": False},
        {"policy_loss": {"type": "sapo"}, "decoupled": False},
        {"policy_loss": {"type": "cispo", "eps_clip": 1.0, "eps_clip_higher": 5.0}},
        {"kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k1", "kl_target": 0.2},
        {
            "dense_rewards": "gain",
            "advantage": {"type": "reward"},
            "num_epochs": 2,
            "early_stop_ratio": 5.0,
        },
        {"policy_loss": {"type": "plugin", "name": "mine", "args": {"a": 1}}},
        {"kl_coef": 0.1, "kl_bound": 5.0, "kl_bias_correction": True, "length_penalty": {}},
        {"rejection": {"upper": 2.0}, "overlong": {"max_tokens": 9, "buffer_tokens": 3}},
    ],
)
def test_what_a_resolved_file_spells_out_loads_as_the_same(options):
    config = AlgorithmConfig.model_validate(options)
    assert AlgorithmConfig.model_validate(config.model_dump()) == config
