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
        ({"objective": "unclipped", "eps_clip": 0.3}, "clips nothing"),
        ({"objective": "sapo", "decoupled": False, "eps_clip_higher": 0.3}, "clips nothing"),
        ({"objective": "cispo", "dual_clip": 3.0}, "dual_clip belongs"),
        ({"sapo_temperature_positive": 2.0}, "belong to objective=sapo"),
        ({"objective": "sapo"}, "decoupled=false"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "kl_straight_through"),
        ({"scale_level": "batch", "scale_by_std": False}, "scale_level=batch"),
        ({"scale_level": "batch", "baseline": "none"}, "scale_level=batch"),
        ({"decoupled": False, "behaviour_weight_floor": 0.5}, "behaviour_weight_floor: without"),
        ({"decoupled": False, "behaviour_weight_action": "clamp"}, "behaviour_weight_action: wi"),
        ({"decoupled": False, "behaviour_weight_level": "geometric"}, "weight_level: without"),
        ({"decoupled": False, "rejection": {"upper": 2.0}}, "rejection: without"),
        ({"decoupled": False, "m2_threshold": 0.1}, "m2_threshold: without"),
        ({"decoupled": False, "proximal": "interpolate"}, "proximal: without"),
        ({"proximal": "interpolate", "m2_threshold": 0.1}, "set proximal=recompute"),
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
        ({"dense_rewards": "gain"}, "baseline=group is of whole trajectories"),
        (
            {"dense_rewards": "gain", "baseline": "none", "zero_truncated": True},
            "zero_truncated: shape the score of a trajectory",
        ),
        (
            {"dense_rewards": "score", "baseline": "none", "reward_bias": 1.0},
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
        {"objective": "sapo", "decoupled": False},
        {"objective": "cispo", "eps_clip": 1.0, "eps_clip_higher": 5.0},
        {"kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k1", "kl_target": 0.2},
        {"dense_rewards": "gain", "baseline": "none", "num_epochs": 2, "early_stop_ratio": 5.0},
        {"rejection": {"upper": 2.0}, "overlong": {"max_tokens": 9, "buffer_tokens": 3}},
    ],
)
def test_what_a_resolved_file_spells_out_loads_as_the_same(options):
    config = AlgorithmConfig.model_validate(options)
    assert AlgorithmConfig.model_validate(config.model_dump()) == config
