"""The section `ppo` is honoured or refused, and what follows from it is filled in."""

from __future__ import annotations

import pytest
import yaml

from headway.contracts.config.ppo_code import (
    PPOCodeExperiment,
    PPOMathExperiment,
    VerifiedPPOExperiment,
)
from headway.contracts.config.ppo_settings import PPOCodeConfig
from headway.contracts.errors import ConfigError
from headway.runtime.config import dump_yaml, load_config, validate_config
from headway.runtime.model_settings import describe

NEEDED = {"model": {"path": "m"}, "data": {"path": "d"}, "weight_sync": {"root": "w"}}


def load(tree: dict, kind: type[VerifiedPPOExperiment] = PPOCodeExperiment):
    return validate_config(kind, NEEDED | tree)


@pytest.mark.parametrize(
    ("ppo", "message"),
    [
        ({"group_size": 4, "generation_size": 2}, "generation_size=2 is less than group_size=4"),
        ({"group_adv_norm": True, "adv_norm": False}, "set adv_norm=true"),
        ({"ref_ema_eta": 1.1}, "ppo.ref_ema_eta: Input should be less than or equal to 1"),
        ({"ref_ema_eta": -0.1}, "ppo.ref_ema_eta: Input should be greater than or equal to 0"),
        ({"kl_ctl": 0, "ref_ema_eta": 0.5}, "ref_ema_eta: kl_ctl=0 takes nothing off"),
        ({"kl_ctl": 0, "use_adaptive_kl_ctl": True}, "use_adaptive_kl_ctl: kl_ctl=0"),
        ({"adaptive_kl_target": 0.1}, "set use_adaptive_kl_ctl=true"),
        ({"adaptive_kl_horizon": 5}, "set use_adaptive_kl_ctl=true"),
        ({"use_dense_reward": True, "mask_no_eos_with_zero": True}, "mask_no_eos_with_zero: shape"),
        ({"use_dense_reward": True, "reward_output_bias": 1}, "reward_output_bias: shape"),
        ({"use_dense_reward": True, "reward_output_scaling": 2}, "reward_output_scaling: shape"),
        ({"use_dense_reward": True, "check_xml_format": True}, "check_xml_format: shape"),
        ({"reward_delta": False}, "set use_dense_reward=true"),
        ({"disable_value": True, "value_eps_clip": 0.5}, "disable_value=true leaves out"),
        ({"disable_value": True, "value_norm": False}, "disable_value=true leaves out"),
        ({"disable_value": True, "critic_sample_reuse": 2}, "disable_value=true leaves out"),
        ({"value_norm": False, "value_norm_type": "ma"}, "value_norm=false scales no values"),
        ({"value_norm_type": "ma", "value_norm_beta": 0.9}, "belong to value_norm_type=exp"),
        ({"value_norm_type": "ma", "value_norm_eps": 0.1}, "belong to value_norm_type=exp"),
        ({"dataset_filter_threshold": 1.0}, "lets no prompt leave"),
        ({"dataset_max_filter_percentage": 1.5}, "less than or equal to 1"),
        ({"early_stop_imp_ratio": 0.0}, "greater than 0"),
        ({"early_stop_kl": -1.0}, "greater than 0"),
        ({"c_clip": 1.0}, "greater than 1"),
        ({"rw_type": "dense"}, "rw_type=dense scores every token by a model"),
        ({"ppo_n_minibatches": 64}, "ppo.ppo_n_minibatches=64 exceeds data.batch_size=32"),
        ({"kl_ctrl": 0.1}, "did you mean 'kl_ctl'"),
    ],
)
def test_a_choice_without_effect_or_sense_is_refused(ppo, message):
    with pytest.raises(ConfigError) as caught:
        load({"ppo": ppo})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"rollout": {"group_size": 8}}, "rollout.group_size=8, but ppo samples 1"),
        ({"reference": {"ema_eta": 0.5}}, "reference.ema_eta=0.5, but ppo.ref_ema_eta=None"),
        ({"reference": {"path": "r"}, "ppo": {"kl_ctl": 0}}, "while ppo.kl_ctl=0"),
        ({"teacher": {"path": "t"}}, "learns nothing of a teacher"),
        ({"algorithm": {"eps_clip": 0.1}}, "unknown key algorithm"),
        ({"critic": {"eps_clip": 0.1}}, "unknown key critic"),
        (
            {"ppo": {"disable_value": True}, "critic_optimizer": {"lr": 1e-6}},
            "leave out critic_model and critic_optimizer",
        ),
        (
            {"ppo": {"group_size": 2}, "sampling": {"temperature": 0.0}},
            "sampling.temperature=0 gives equal siblings",
        ),
        ({"rollout": {"max_context_tokens": 512}}, "set rollout.max_prompt_tokens"),
        (
            {
                "rollout": {"max_context_tokens": 512, "max_prompt_tokens": 300},
                "sampling": {"max_new_tokens": 213},
            },
            "are 513 tokens, more than rollout.max_context_tokens=512",
        ),
    ],
)
def test_sections_that_contradict_one_another_are_refused(tree, message):
    with pytest.raises(ConfigError) as caught:
        load(tree)
    assert message in str(caught.value)


def test_what_fits_into_the_context_to_the_last_token_loads():
    rollout = {"max_context_tokens": 512, "max_prompt_tokens": 300}
    load({"rollout": rollout, "sampling": {"max_new_tokens": 212}})


def test_other_sections_follow():
    config = load({"ppo": {"group_size": 4, "generation_size": 16, "ref_ema_eta": 0.1}})
    assert config.rollout.group_size == 16
    assert config.reference.ema_eta == 0.1
    assert (config.batch_trajectories, config.trained_trajectories) == (512, 128)
    assert config.algorithm.num_minibatches == 4
    assert load({"ppo": {"ref_ema_eta": 0.0}}).reference.ema_eta is None
    # Said twice, and alike, it is no contradiction: so a resolved file says it.
    assert load({"ppo": {"group_size": 4}, "rollout": {"group_size": 4}}).rollout.group_size == 4


def test_without_values_both_factors_are_one():
    config = load({"ppo": {"disable_value": True, "discount": 0.9, "gae_lambda": 0.5}})
    assert config.critic is None
    assert (config.algorithm.discount, config.algorithm.advantage.type) == (0.45, "reward")


def test_a_task_has_its_verifier_unless_told_otherwise():
    assert load({}).rollout.reward.name == "code"
    assert load({}, PPOMathExperiment).rollout.reward.name == "math"
    named = load({"rollout": {"reward": {"name": "gsm8k"}}}, PPOMathExperiment)
    assert named.rollout.reward.name == "gsm8k"


@pytest.mark.parametrize("kind", [PPOCodeExperiment, PPOMathExperiment])
@pytest.mark.parametrize(
    "ppo",
    [
        {},
        {"disable_value": True, "kl_ctl": 0.0, "group_size": 8, "group_adv_norm": True},
        {"use_dense_reward": True, "reward_delta": False, "early_stop_imp_ratio": None},
        {"use_adaptive_kl_ctl": True, "adaptive_kl_target": 0.1, "ref_ema_eta": 1.0},
        {"value_norm_type": "ma", "generation_size": 4, "dataset_max_filter_percentage": 0.1},
    ],
    ids=str,
)
def test_what_a_resolved_file_spells_out_loads_as_the_same(tmp_path, kind, ppo):
    config = load({"ppo": ppo, "type": kind.model_fields["type"].default}, kind)
    (tmp_path / "resolved.yaml").write_text(dump_yaml(config))
    assert load_config(kind, ["--config", str(tmp_path / "resolved.yaml")]) == config
    assert yaml.safe_load(dump_yaml(config))["rollout"]["group_size"] == config.ppo.num_samples


def test_flags_reach_the_section_and_every_field_is_told():
    flags = ["--model.path", "m", "--data.path", "d", "--weight-sync.root", "w"]
    config = load_config(PPOCodeExperiment, [*flags, "--ppo.generation-size", "3"])
    assert config.rollout.group_size == 3
    text = "\n".join(describe(PPOCodeExperiment))
    for name, field in PPOCodeConfig.model_fields.items():
        assert f"--ppo.{name}".replace("_", "-") in text
        assert field.description
