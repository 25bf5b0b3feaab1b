"""PPO on verified answers to code and math tasks, in the words of the `ppo-code` experiment.

One section, `ppo` (`ppo_settings`), holds what there is to choose; the settings of actor, critic and
reference follow from it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.critic import CriticConfig, ValueModelConfig
from headway.contracts.config.experiment import RolloutExperiment
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.ppo_settings import PPOCodeConfig
from headway.contracts.config.rollout import RolloutConfig

INITIAL_VALUE_STD = 0.1
"""A normalised critic's first values are a tenth of what it says."""


class PPOCodeRolloutConfig(RolloutConfig):
    reward: ComponentConfig = ComponentConfig(name="code")
    """Registered verifier that scores a trajectory: 1 is right, 0 is wrong, and counts as -1."""
    group_size: int = Field(1, ge=1, le=1024)
    """Trajectories per prompt that are sampled; follows from `ppo`."""
    max_staleness: int = Field(0, ge=0)
    """Maximum number of versions between sampling and consumption (η); 0 is synchronous. The loss
    clips around the policy that sampled, and corrects nothing else of its age."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Prompts of more tokens are left out; None keeps all."""
    fill_to_max_length: bool = False
    """Lengthen every prompt to `max_prompt_tokens`, by repeats of its last token in front: for
    measurements alone."""
    max_context_tokens: int | None = Field(None, ge=2)
    """Tokens per sequence that every generation server can hold, prompt included: the longest prompt and
    `sampling.max_new_tokens` have to fit (limits of rows, `data.max_new_tokens_key`, are not looked at).
    None takes what the servers report at the start, and leaves out the prompts that do not fit."""


class VerifiedPPOExperiment(RolloutExperiment):
    """Proximal policy optimisation on what a verifier says of answers.

    The service samples `ppo.generation_size` trajectories per prompt and counts all of them, at their
    admission and as consumed: B of its staleness bound is `batch_trajectories`, that many times
    `data.batch_size`, although a version learns from `trained_trajectories` alone.
    """

    ppo: PPOCodeConfig = PPOCodeConfig()
    rollout: PPOCodeRolloutConfig = PPOCodeRolloutConfig()
    critic_model: ValueModelConfig | None = None
    """The critic to start from; None takes the policy's model, with a scalar head in place of its own."""
    critic_optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW of the critic, and its schedule."""
    reward_model: ValueModelConfig | None = None
    """The model that scores answers where `ppo.reward_source` asks it; its tokens are the policy's."""

    @property
    def trained_trajectories(self) -> int:
        """Trajectories that a version learns from."""
        return self.data.batch_size * self.ppo.group_size

    @property
    def scores_rollouts_later(self) -> bool:
        """Unless rewards come with the rollouts' turns, or a call of the configuration brings them."""
        is_replaced = any("scores" in call.output_keys for call in self.dataflow.calls)
        comes_with_turns = self.ppo.use_dense_reward and self.ppo.rw_type == "sparse"
        return not comes_with_turns and not is_replaced

    @property
    def algorithm(self) -> AlgorithmConfig:
        """Algorithm by which the policy learns."""
        ppo = self.ppo
        kl: dict[str, Any] = {}
        if ppo.kl_ctl > 0:
            kl = {"kl_in": "reward", "kl_coef": ppo.kl_ctl, "kl_estimator": "k1"}
        if ppo.use_adaptive_kl_ctl:
            kl |= {"kl_target": ppo.adaptive_kl_target, "kl_horizon": ppo.adaptive_kl_horizon}
        # Without values δ is the reward, and both factors only ever stand together.
        discount = ppo.discount
        advantage: dict[str, Any] = {"type": "gae", "gae_lambda": ppo.gae_lambda}
        if ppo.disable_value:
            discount, advantage = discount * ppo.gae_lambda, {"type": "reward"}
        scope = "group" if ppo.group_adv_norm else "batch"
        gain = "gain" if ppo.reward_delta else "score"
        return AlgorithmConfig.model_validate(
            {
                **kl,
                "policy_loss": {"eps_clip": ppo.eps_clip, "dual_clip": ppo.c_clip},
                "decoupled": False,
                "advantage": advantage,
                "advantage_norm": scope if ppo.adv_norm else "none",
                "discount": discount,
                "num_minibatches": ppo.ppo_n_minibatches,
                "num_epochs": ppo.actor_sample_reuse,
                "early_stop_ratio": ppo.early_stop_imp_ratio,
                "early_stop_kl": ppo.early_stop_kl,
                "mask_truncated": ppo.mask_too_long,
                "zero_truncated": ppo.mask_no_eos_with_zero,
                "dense_rewards": gain if ppo.use_dense_reward else "none",
                **self._reward_shape(),
                "reward_clip": ppo.max_reward_clip,
                "sampling_mask": "ignore" if ppo.force_no_logits_mask else "replay",
            }
        )

    def _reward_shape(self) -> dict[str, float]:
        """Return bias and scaling of the scores; those of a model are rewards already."""
        ppo = self.ppo
        if ppo.reward_source != "verifier":
            return {}
        return {
            "reward_scaling": ppo.reward_output_scaling,
            "reward_bias": 0.0 - ppo.reward_output_bias,
        }

    @property
    def critic(self) -> CriticConfig | None:
        """Settings of the critic; None without one."""
        ppo = self.ppo
        if ppo.disable_value:
            return None
        norm: dict[str, Any] = {}
        if ppo.value_norm:
            norm = {"normalization": "cumulative", "initial_std": INITIAL_VALUE_STD}
        if ppo.value_norm and ppo.value_norm_type == "exp":
            norm |= {
                "normalization": "exponential",
                "decay": ppo.value_norm_beta,
                "normalization_eps": ppo.value_norm_eps,
            }
        return CriticConfig(
            model=self.critic_model,
            optimizer=self.critic_optimizer,
            eps_clip=ppo.value_eps_clip,
            num_epochs=ppo.critic_sample_reuse,
            **norm,
        )

    @model_validator(mode="before")
    @classmethod
    def _follow_ppo(cls, tree: Any) -> Any:
        """Fill in, in other sections, what `ppo` says already."""
        if not isinstance(tree, dict):
            return tree
        try:
            ppo = PPOCodeConfig.model_validate(tree.get("ppo", {}))
        except ValidationError:  # reported with the section's own path
            return tree
        follows: dict[str, dict[str, Any]] = {
            "rollout": {"group_size": ppo.num_samples},
            "reference": {"ema_eta": ppo.ref_ema_eta or None},
        }
        sections = {name: tree.get(name, {}) for name in follows}
        filled = {
            name: {**follows[name], **section}
            for name, section in sections.items()
            if isinstance(section, dict)
        }
        return {**tree, **filled}

    @model_validator(mode="after")
    def _check_ppo(self) -> VerifiedPPOExperiment:
        ppo, seen = self.ppo, self.rollout.group_size
        if seen != ppo.num_samples:
            raise ValueError(
                f"rollout.group_size={seen}, but ppo samples {ppo.num_samples}; leave it out, and set "
                "ppo.group_size or ppo.generation_size"
            )
        if self.reference.ema_eta != (ppo.ref_ema_eta or None):
            raise ValueError(
                f"reference.ema_eta={self.reference.ema_eta}, but ppo.ref_ema_eta={ppo.ref_ema_eta}; "
                "leave it out, and set ppo.ref_ema_eta"
            )
        if self.reference.path is not None and ppo.kl_ctl == 0:
            raise ValueError("reference keeps no policy near while ppo.kl_ctl=0; set it")
        if self.has_teacher:
            raise ValueError("ppo learns nothing of a teacher; leave it out")
        if ppo.ppo_n_minibatches > self.data.batch_size:
            raise ValueError(
                f"ppo.ppo_n_minibatches={ppo.ppo_n_minibatches} exceeds "
                f"data.batch_size={self.data.batch_size} prompts; a mini-batch holds whole groups"
            )
        has_critic_section = self.critic_model is not None or self.critic_optimizer != (
            OptimizerConfig()
        )
        if (self.reward_model is None) != (ppo.reward_source == "verifier"):
            raise ValueError(
                f"ppo.reward_source={ppo.reward_source} "
                f"{'asks no' if self.reward_model is not None else 'wants a'} reward_model; "
                "set both or neither"
            )
        if ppo.disable_value and has_critic_section:
            raise ValueError(
                "ppo.disable_value=true leaves out the critic; leave out critic_model and "
                "critic_optimizer as well"
            )
        return self

    @model_validator(mode="after")
    def _check_context(self) -> VerifiedPPOExperiment:
        prompt, context = self.rollout.max_prompt_tokens, self.rollout.max_context_tokens
        if self.rollout.fill_to_max_length and prompt is None:
            raise ValueError(
                "rollout.fill_to_max_length=true wants the length; set rollout.max_prompt_tokens"
            )
        if context is None:
            return self
        if prompt is None:
            raise ValueError(
                f"whether every prompt fits into rollout.max_context_tokens={context} is not known; set "
                "rollout.max_prompt_tokens, beyond which prompts are left out"
            )
        new = self.sampling.max_new_tokens
        if prompt + new > context:
            raise ValueError(
                f"rollout.max_prompt_tokens={prompt} and sampling.max_new_tokens={new} are "
                f"{prompt + new} tokens, more than rollout.max_context_tokens={context}; lower one of "
                "the two, or give the servers more"
            )
        return self


class PPOCodeExperiment(VerifiedPPOExperiment):
    """Proximal policy optimisation on code tasks."""

    type: Literal["ppo-code"] = "ppo-code"


class PPOMathRolloutConfig(PPOCodeRolloutConfig):
    reward: ComponentConfig = ComponentConfig(name="math")
    """Registered verifier that scores a trajectory: 1 is right, 0 is wrong, and counts as -1."""


class PPOMathExperiment(VerifiedPPOExperiment):
    """Proximal policy optimisation on math tasks."""

    type: Literal["ppo-math"] = "ppo-math"
    rollout: PPOMathRolloutConfig = PPOMathRolloutConfig()
