"""`examples/ppo_code/original.yaml` has every default of the original experiment, by its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.ppo_code import PPOCodeExperiment
from headway.runtime.config import load_config

FILE = Path(__file__).parents[3] / "examples" / "ppo_code" / "original.yaml"
ADAM = {
    "type": ("type", "adam"),
    "lr": ("lr", 1e-5),
    "weight_decay": ("weight_decay", 0.05),
    "beta1": ("beta1", 0.9),
    "beta2": ("beta2", 0.95),
    "eps": ("eps", 1e-5),
    "min_lr_ratio": ("min_lr_ratio", 0.0),
    "lr_scheduler_type": ("schedule", "cosine"),
    "warmup_steps_proportion": ("warmup_proportion", 0.02),
    "gradient_clipping": ("max_grad_norm", 1.0),
    "initial_loss_scale": ("initial_loss_scale", 4096.0),
}
ORIGINAL: dict[str, tuple[str, Any]] = {
    "actor.init_from_scratch": ("model.init_from_scratch", False),
    "actor.gradient_checkpointing": ("model.gradient_checkpointing", True),
    "actor.enable_fp16": ("trainer.compute_dtype", "float16"),
    "dataset.max_prompt_len": ("rollout.max_prompt_tokens", 256),
    "dataset.train_bs_n_seqs": ("data.batch_size", 256),
    "dataset.fill_to_max_length": ("rollout.fill_to_max_length", False),
    "gen.n": ("rollout.group_size", 1),
    "gen.max_new_tokens": ("sampling.max_new_tokens", 256),
    "gen.min_new_tokens": ("sampling.min_new_tokens", 256),
    "gen.top_p": ("sampling.top_p", 0.9),
    "gen.top_k": ("sampling.top_k", 200),
    "gen.temperature": ("sampling.temperature", 1.0),
    "vllm.max_seq_len_to_capture": ("rollout.max_context_tokens", 8192),
    "ppo.ppo_n_minibatches": ("ppo.ppo_n_minibatches", 4),
    "ppo.kl_ctl": ("ppo.kl_ctl", 0.1),
    "ppo.discount": ("ppo.discount", 1.0),
    "ppo.gae_lambda": ("ppo.gae_lambda", 1.0),
    "ppo.eps_clip": ("ppo.eps_clip", 0.2),
    "ppo.value_eps_clip": ("ppo.value_eps_clip", 0.2),
    "ppo.disable_value": ("ppo.disable_value", False),
    "ppo.max_reward_clip": ("ppo.max_reward_clip", 20.0),
    "ppo.reward_output_scaling": ("ppo.reward_output_scaling", 1.0),
    "ppo.reward_output_bias": ("ppo.reward_output_bias", 0.0),
    "ppo.early_stop_imp_ratio": ("ppo.early_stop_imp_ratio", 5.0),
    "ppo.use_adaptive_kl_ctl": ("ppo.use_adaptive_kl_ctl", False),
    "ppo.adv_norm": ("ppo.adv_norm", True),
    "ppo.value_norm": ("ppo.value_norm", True),
    "ppo.value_norm_type": ("ppo.value_norm_type", "exp"),
    "ppo.value_norm_beta": ("ppo.value_norm_beta", 0.99995),
    "ppo.value_norm_eps": ("ppo.value_norm_eps", 1e-5),
    "group_size": ("ppo.group_size", 1),
    "generation_size": ("ppo.generation_size", None),
    "mask_no_eos_with_zero": ("ppo.mask_no_eos_with_zero", False),
    "rm_output_scaling": ("ppo.rm_output_scaling", None),
    "ref_ema_eta": ("ppo.ref_ema_eta", None),
    "group_adv_norm": ("ppo.group_adv_norm", False),
    "mask_too_long": ("ppo.mask_too_long", False),
    "rw_type": ("ppo.rw_type", "sparse"),
    "task": ("rollout.reward.name", "code"),
    "check_xml_format": ("ppo.check_xml_format", False),
    "use_dense_reward": ("ppo.use_dense_reward", False),
    "reward_delta": ("ppo.reward_delta", True),
    "check_verifier_status": ("ppo.check_verifier_status", False),
    "dataset_filter_threshold": ("ppo.dataset_filter_threshold", 100.0),
    "dataset_max_filter_percentage": ("ppo.dataset_max_filter_percentage", 0.0),
    "exp_ctrl.total_train_epochs": ("trainer.total_epochs", 1),
    "exp_ctrl.benchmark_steps": ("trainer.stop_after_steps", None),
    "exp_ctrl.save_freq_epochs": ("export.every_epochs", None),
    "exp_ctrl.save_freq_steps": ("export.every_steps", None),
    "exp_ctrl.save_freq_secs": ("export.every_s", None),
    "exp_ctrl.ckpt_freq_epochs": ("recovery.every_epochs", None),
    "exp_ctrl.ckpt_freq_steps": ("recovery.every_steps", None),
    "exp_ctrl.ckpt_freq_secs": ("recovery.every_s", None),
    "exp_ctrl.eval_freq_epochs": ("evaluation", None),
    "recover_mode": ("recovery.mode", "disabled"),
    "recover_retries": ("recovery.retries", 1),
    "recover_after": ("recovery.retry_after_s", 10.0),
    "seed": ("trainer.seed", 1),
    **{f"actor.optimizer.{name}": (f"optimizer.{ours}", v) for name, (ours, v) in ADAM.items()},
    **{f"critic.optimizer.{n}": (f"critic_optimizer.{ours}", v) for n, (ours, v) in ADAM.items()},
}


def value_at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.fixture(scope="module")
def original() -> PPOCodeExperiment:
    return load_config(LaunchConfig, ["--config", str(FILE)]).trainer


@pytest.mark.parametrize("name", ORIGINAL)
def test_the_file_has_the_originals_default(original, name):
    path, value = ORIGINAL[name]
    assert value_at(original, path) == value


def test_every_field_of_the_section_ppo_is_one_of_the_originals_or_named_here(original):
    """The others are interface arguments there, or ours."""
    ours = {"actor_sample_reuse", "critic_sample_reuse", "c_clip", "early_stop_kl", "reward_source"}
    arguments = {"adaptive_kl_target", "adaptive_kl_horizon", "force_no_logits_mask"}
    named = {path.removeprefix("ppo.") for path, _ in ORIGINAL.values() if path.startswith("ppo.")}
    assert set(type(original.ppo).model_fields) == named | ours | arguments


@pytest.mark.parametrize(("flag", "wanted"), [("false", "replay"), ("true", "ignore")])
def test_the_logits_mask_is_that_of_sampling(flag, wanted):
    flags = ["--config", str(FILE), "--trainer.ppo.force-no-logits-mask", flag]
    assert load_config(LaunchConfig, flags).trainer.algorithm.sampling_mask == wanted
