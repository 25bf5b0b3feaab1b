"""The section `ppo` of PPO on verified answers: all that there is to choose."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headway.contracts.config.base import Config

WRONG_SCORE = -1.0
"""Score of a wrong answer, before bias and scaling: no answer scores less."""


class PPOCodeConfig(Config):
    group_size: int = Field(1, ge=1, le=1024)
    """Trajectories per prompt that are learned from."""
    generation_size: int | None = Field(None, ge=1, le=1024)
    """Trajectories per prompt that are sampled and scored; the `group_size` best are learned from, the
    longer among equals, then the earlier. None samples `group_size`."""
    disable_value: bool = False
    """No critic: every value is 0, and an advantage the sum of later rewards, each
    `discount · gae_lambda` times less per action."""
    kl_ctl: float = Field(0.1, ge=0.0)
    """Taken off each action's reward, times logprob - reference logprob (nats, between -10 and 10); 0
    loads no reference."""
    use_adaptive_kl_ctl: bool = False
    """Move the coefficient from `kl_ctl` on so that the KL stays near `adaptive_kl_target`: it rises
    while the KL is above."""
    adaptive_kl_target: float = Field(6.0, gt=0.0)
    """Mean of logprob - reference logprob over actions, in nats per token."""
    adaptive_kl_horizon: int = Field(10_000, ge=1)
    """Trajectories over which a KL that is off by 20 % or more moves the coefficient by about 20 %."""
    discount: float = Field(1.0, gt=0.0, le=1.0)
    """Gamma of generalised advantages (arXiv:1506.02438), per action."""
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Lambda of the same: 0 trusts the critic after one action, 1 only what was earned."""
    eps_clip: float = Field(0.2, gt=0.0, le=1.0)
    """The ratio policy / behaviour is clipped to 1 ± this (PPO, arXiv:1707.06347)."""
    c_clip: float | None = Field(None, gt=1.0)
    """Dual clip: bound on the ratio where the advantage is negative (arXiv:1912.09729); None has none."""
    value_eps_clip: float = Field(0.2, gt=0.0)
    """Values may move this far from those before the step, normalised; the larger loss of moved and plain
    counts."""
    early_stop_imp_ratio: float | None = Field(5.0, gt=0.0)
    """A micro-batch whose mean ratio policy / behaviour is above this gives the policy no gradient; the
    optimizer steps nevertheless. None stops nothing."""
    early_stop_kl: float | None = Field(None, gt=0.0)
    """The same for the estimate (k3) of KL(behaviour || policy), in nats per token."""
    ppo_n_minibatches: int = Field(4, ge=1)
    """Optimizer steps per epoch, of actor and critic; a mini-batch holds whole groups."""
    actor_sample_reuse: int = Field(1, ge=1)
    """Epochs: times that the policy learns from a batch, with the same advantages."""
    critic_sample_reuse: int = Field(1, ge=1)
    """The same of the critic, with the same returns."""
    max_reward_clip: float = Field(20.0, gt=0.0)
    """Bound on the absolute value of a reward, after scaling."""
    reward_output_scaling: float = Field(1.0, gt=0.0)
    """A reward is (score - `reward_output_bias`) times this."""
    reward_output_bias: float = 0.0
    """Taken off the score, which is 1 of a right and -1 of a wrong answer (`check_xml_format`)."""
    rm_output_scaling: float | None = Field(None, gt=0.0)
    """Factor on the score of `reward_model`; None takes `reward_output_scaling`."""
    reward_source: Literal["verifier", "model", "both"] = "verifier"
    """`verifier` asks `rollout.reward`. `model` asks `reward_model`: the reward is
    (its score - `reward_output_bias`) · `rm_output_scaling`. `both` adds the model's score, times
    `rm_output_scaling`, to the verifier's reward."""
    rw_type: Literal["sparse", "dense"] = "sparse"
    """`sparse` scores an answer once, as a whole; `dense` has `reward_model` score the text after every
    token, too, for `use_dense_reward`."""
    use_dense_reward: bool = False
    """Reward every action by a score after every token, in place of the answer's own;
    `mask_no_eos_with_zero`, bias and scaling of a verifier are of the latter. The scores are those of the
    rollout's turns, or with `rw_type: dense` those of the reward model."""
    reward_delta: bool = True
    """A dense reward is what an action gained, the score after it less the score before; false: the score
    after it."""
    check_xml_format: bool = False
    """A wrong answer scores -0.8, not -1, if it is `<think>…</think><answer>…</answer>` and nothing else;
    the first `<think>` may be the prompt's."""
    check_verifier_status: bool = False
    """Stop the run at a batch without any score above the lowest, as from a verifier that scores nothing.
    (One that fails gives no score, and is asked again, whatever this says.)"""
    mask_no_eos_with_zero: bool = False
    """Give answers that ran into a limit no score; what the KL costs stays."""
    mask_too_long: bool = False
    """Leave answers that ran into a limit out of losses, and of every mean and spread."""
    adv_norm: bool = True
    """Centre and scale advantages over all tokens of the batch."""
    group_adv_norm: bool = False
    """Centre and scale them over the tokens of each prompt's group instead."""
    value_norm: bool = True
    """The critic speaks in units of the returns' running mean and spread."""
    value_norm_type: Literal["exp", "ma"] = "exp"
    """`exp` averages them exponentially, `ma` over all so far."""
    value_norm_beta: float = Field(0.99995, gt=0.0, lt=1.0)
    """Decay of `exp`, per version."""
    value_norm_eps: float = Field(1e-5, ge=0.0, lt=1.0)
    """`exp` is debiased by the weight of what it has seen, or by this if that is less."""
    force_no_logits_mask: bool = False
    """Take logprobs over all tokens, although `sampling` may have cut some of them (top_p, top_k, min_p):
    ratios are then biased, and tokens that could not be drawn get a gradient. False takes them over the
    tokens that could be drawn, which `embedded_torch` reports."""
    ref_ema_eta: float | None = Field(None, ge=0.0, le=1.0)
    """The reference follows the policy: after each version it is eta · policy + (1 - eta) · reference, so
    that 1 copies the policy; 0 and None leave it as it is."""
    dataset_filter_threshold: float = 100.0
    """At the end of an epoch, prompts leave whose last group's mean reward, before `max_reward_clip`, was
    above this."""
    dataset_max_filter_percentage: float = Field(0.0, ge=0.0, le=1.0)
    """Maximum share of the running prompts that leaves at a time, those of the highest rewards first."""

    @property
    def num_samples(self) -> int:
        """Trajectories per prompt that are sampled."""
        return self.group_size if self.generation_size is None else self.generation_size

    @property
    def model_output_scaling(self) -> float:
        """Factor on the score of the reward model."""
        scaling = self.rm_output_scaling
        return self.reward_output_scaling if scaling is None else scaling

    @property
    def lowest_reward(self) -> float:
        """Reward of a wrong answer, before `max_reward_clip`."""
        return (WRONG_SCORE - self.reward_output_bias) * self.reward_output_scaling

    @model_validator(mode="after")
    def _check(self) -> PPOCodeConfig:
        if self.num_samples < self.group_size:
            raise ValueError(
                f"generation_size={self.generation_size} is less than group_size={self.group_size}, "
                "which is taken from it; raise it, or leave it out"
            )
        if self.rw_type == "dense" and not (
            self.use_dense_reward and self.reward_source == "model"
        ):
            raise ValueError(
                "rw_type=dense scores every token by a model, for use_dense_reward; set "
                "reward_source=model and use_dense_reward=true"
            )
        if self.use_dense_reward and self.rw_type == "sparse" and self.reward_source != "verifier":
            raise ValueError(
                f"reward_source={self.reward_source} scores whole answers, which use_dense_reward=true "
                "ignores; set rw_type=dense and reward_source=model"
            )
        if self.group_adv_norm and not self.adv_norm:
            raise ValueError("group_adv_norm says over what adv_norm is; set adv_norm=true")
        for is_there, what, names in self._dependents():
            chosen = [name for name in names if self._is_set(name)]
            if not is_there and chosen:
                raise ValueError(f"{', '.join(chosen)}: {what}")
        return self

    def _dependents(self) -> tuple[tuple[bool, str, tuple[str, ...]], ...]:
        """`(whether it is there, what is to be done, fields that are without effect otherwise)`."""
        norm = ("value_norm_type", "value_norm_beta", "value_norm_eps")
        adaptive = ("adaptive_kl_target", "adaptive_kl_horizon")
        sparse = ("reward_output_scaling", "reward_output_bias")
        return (
            (
                self.kl_ctl > 0,
                "kl_ctl=0 takes nothing off; set it above 0",
                ("use_adaptive_kl_ctl", *(("ref_ema_eta",) if self.ref_ema_eta else ())),
            ),
            (self.use_adaptive_kl_ctl, "set use_adaptive_kl_ctl=true", adaptive),
            (
                not self.disable_value,
                "disable_value=true leaves out the critic; leave these out as well",
                ("value_eps_clip", "critic_sample_reuse", "value_norm", *norm),
            ),
            (self.value_norm, "value_norm=false scales no values; leave these out as well", norm),
            (
                self.value_norm_type == "exp",
                "these belong to value_norm_type=exp",
                ("value_norm_beta", "value_norm_eps"),
            ),
            (self.use_dense_reward, "set use_dense_reward=true", ("reward_delta",)),
            (
                not self.use_dense_reward or self.rw_type == "dense",
                "shape the score of an answer, which use_dense_reward=true ignores",
                sparse,
            ),
            (
                not self.use_dense_reward,
                "shape the score of an answer, which use_dense_reward=true ignores",
                ("mask_no_eos_with_zero", "check_xml_format"),
            ),
            (
                self.reward_source != "verifier",
                "scales the score of a model; set reward_source=model or both",
                ("rm_output_scaling",),
            ),
            (
                self.reward_source != "model",
                "reward_source=model asks no verifier; leave these out",
                ("check_xml_format", "check_verifier_status"),
            ),
            (
                self.dataset_max_filter_percentage > 0,
                "dataset_max_filter_percentage=0 lets no prompt leave; set it above 0",
                ("dataset_filter_threshold",),
            ),
        )

    def _is_set(self, name: str) -> bool:
        """True if a field differs from its default: a resolved file spells out every field."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)
