"""Policy optimisation: rewards, advantages, the policy loss and its corrections, each chosen by name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headway.contracts.config.advantages import (
    AdvantageConfig,
    CriticAdvantageConfig,
    GAEAdvantageConfig,
    GRPOAdvantageConfig,
)
from headway.contracts.config.base import Config
from headway.contracts.config.policy_losses import ClipLossConfig, PolicyLossConfig


class OverlongConfig(Config):
    """A penalty that grows over the last tokens before the limit (DAPO, arXiv:2503.14476)."""

    max_tokens: int = Field(ge=1)
    """Sampled tokens at which the penalty is whole; usually `sampling.max_new_tokens`."""
    buffer_tokens: int = Field(ge=1)
    """The penalty begins this many tokens earlier."""
    factor: float = Field(1.0, ge=0.0)
    """Taken off the score at `max_tokens`, before `reward_bias` and `reward_scaling`."""

    @model_validator(mode="after")
    def _check(self) -> OverlongConfig:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens={self.buffer_tokens} exceeds max_tokens={self.max_tokens}"
            )
        return self


class LengthPenaltyConfig(Config):
    """A bonus for the shortest of a group that falls to a penalty for the longest (Kimi k1.5,
    arXiv:2501.12599, 2.3.3)."""

    coef: float = Field(1.0, gt=0.0)
    """The shortest gains half of it, and the longest loses half of it, before `reward_bias` and
    `reward_scaling`."""
    right_above: float = 0.0
    """Responses that score more are right, and gain; others only lose."""


class RejectionConfig(Config):
    """Tokens, or whole sequences, that are too far from the behaviour policy leave the loss; they stay
    in its denominator."""

    metric: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """`ratio` = proximal / behaviour, or an estimate of KL(behaviour || proximal) in nats."""
    level: Literal["token", "sequence"] = "sequence"
    """Judge each token, or the sequence by one number."""
    statistic: Literal["mean", "sum", "max"] = "mean"
    """Statistic over a sequence's tokens; of `ratio` in log space, so that `mean` is the geometric
    mean and `sum` the ratio of whole responses."""
    lower: float | None = None
    """Lower bound: anything below it is rejected; None has no bound."""
    upper: float | None = None
    """Upper bound: anything above it is rejected; None has no bound."""

    @model_validator(mode="after")
    def _check(self) -> RejectionConfig:
        if self.lower is None and self.upper is None:
            raise ValueError("rejection without lower and upper rejects nothing; set one of them")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"lower={self.lower} exceeds upper={self.upper}")
        if self.level == "token" and self.statistic != "mean":
            raise ValueError(f"statistic={self.statistic} is of sequences; set level=sequence")
        return self


class AlgorithmConfig(Config):
    policy_loss: PolicyLossConfig = ClipLossConfig()
    """What a token's ratio and advantage cost: a loss by `type`, with its own settings."""
    advantage: AdvantageConfig = GRPOAdvantageConfig()
    """How rewards become advantages: an estimator by `type`, with its own settings."""
    ratio_level: Literal["token", "sequence"] = "token"
    """`sequence`: one ratio per response, the geometric mean of its tokens' (GSPO, arXiv:2507.18071);
    each token keeps its own advantage (GSPO-token, 4.3 there)."""
    aggregation: Literal[
        "token_mean",
        "sequence_mean_token_sum",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum_norm",
    ] = "token_mean"
    """Tokens -> loss: the mean over all tokens (DAPO), or the mean over sequences of their sum, of their
    mean (GRPO), or of their sum divided by `aggregation_max_tokens` (Dr. GRPO)."""
    aggregation_max_tokens: int | None = Field(None, ge=1)
    """The constant of `sequence_mean_token_sum_norm`, usually `sampling.max_new_tokens`."""
    entropy_coef: float = Field(0.0, ge=0.0)
    """Weight of the mean entropy, which is made larger."""
    kl_coef: float = Field(0.0, ge=0.0)
    """Weight of KL(policy || reference); above 0 a reference model is loaded (`reference`)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss` adds the penalty to the policy's loss (GRPO), `reward` takes it off each token's reward
    (InstructGPT, arXiv:2203.02155)."""
    kl_target: float | None = Field(None, gt=0.0)
    """Move the coefficient so that the KL stays near this, in nats per token (arXiv:1909.08593); None
    keeps `kl_coef`. Needs `kl_in: reward`."""
    kl_horizon: int = Field(10_000, ge=1)
    """Trajectories over which a KL that is off by 20 % or more moves the coefficient by about 20 %."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimate from sampled tokens; k3 is the one of GRPO."""
    kl_bound: float = Field(10.0, gt=0.0)
    """Bound on a token's absolute estimate, in nats; beyond it the estimate has no gradient."""
    kl_bias_correction: bool = False
    """Weigh the estimate by policy / behaviour, with the gradient of both: unbiased although another
    policy sampled (DeepSeek-V3.2, arXiv:2512.02556, 3.1). Of `kl_in: loss`."""
    kl_straight_through: bool = False
    """The estimate's value with the gradient of k2, which is that of the KL; k1 needs it."""
    decoupled: bool = True
    """Clip around the proximal policy and weigh by proximal / behaviour (AReaL, arXiv:2505.24298);
    false clips around the behaviour policy itself."""
    proximal: Literal["recompute", "loglinear", "linear"] = "recompute"
    """`recompute` asks the policy before its first update; where a version is one update, that one's own
    forward gives, and no other is made. The others save it for good: the proximal policy is guessed on
    the line from behaviour to current, by the token's version, of logprobs or of probabilities (AReaL's
    approximations). Need `decoupled`."""
    behaviour_weight_cap: float | None = Field(5.0, gt=0.0)
    """Tokens with proximal / behaviour above this get weight 0; None keeps all. Needs `decoupled`."""
    behaviour_weight_floor: float | None = Field(None, gt=0.0)
    """The same below this; with the cap it is IcePop's band (arXiv:2510.18855). Needs `decoupled`."""
    behaviour_weight_action: Literal["mask", "clamp"] = "mask"
    """`clamp` moves weights to cap and floor in place of 0 (truncated importance sampling)."""
    behaviour_weight_level: Literal["token", "geometric", "sequence"] = "token"
    """The weight of the token, or of its whole sequence: geometric mean, or product."""
    behaviour_weight_normalize: bool = False
    """Divide the bounded weights by their mean over the batch, so that they do not change the size of the
    step (verl's `rollout_is_batch_normalize`). Needs `decoupled`."""
    opsm_threshold: float | None = Field(None, ge=0.0)
    """Leave out tokens with a negative advantage of sequences whose mean log(behaviour / policy) is above
    this, in nats (off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, 3.1); None keeps all."""
    rejection: RejectionConfig | None = None
    """Leave out what is too far from the behaviour policy. Needs `decoupled`."""
    m2_threshold: float | None = Field(None, gt=0.0)
    """Leave out the tokens with the largest log(proximal / behaviour)² of a batch until its mean is below
    this (M2PO, arXiv:2510.01161); None keeps all. Needs `decoupled`."""
    sampling_mask: Literal["replay", "ignore"] = "replay"
    """Where sampling cuts the distribution (top_k, top_p, min_p): `replay` takes logprobs, ratios, KL and
    entropy over the tokens that could be drawn, as the server reported them (DeepSeek-V3.2,
    arXiv:2512.02556), and servers that report none refuse; `ignore` takes them over all tokens,
    so ratios are biased and tokens that could not be drawn get a gradient."""
    routed_experts: Literal["replay", "ignore"] = "replay"
    """For a mixture of experts: `replay` computes each token with the experts that computed it when it
    was sampled (arXiv:2510.11370), and servers that do not record them refuse; `ignore` lets the routers
    choose again. No matter for a dense model."""
    distillation_coef: float = Field(0.0, ge=0.0)
    """Weight of log(teacher / policy) in each token's advantage, in nats (on-policy distillation,
    arXiv:2306.08543); above 0 a `teacher` is needed. `reward_scaling: 0` learns from it alone."""
    distillation_top_k: int = Field(0, ge=0, le=64)
    """Add to the loss, in place of that advantage, `distillation_coef` times the KL between policy and
    teacher over the teacher's so many likeliest tokens, with all others taken as one (GKD,
    arXiv:2306.13649). 0 learns from the sampled token alone."""
    distillation_divergence: Literal["reverse", "forward"] = "reverse"
    """With `distillation_top_k`: `reverse` is KL(policy || teacher), `forward` KL(teacher || policy)."""
    advantage_norm: Literal["none", "batch", "group"] = "none"
    """Centre and scale the tokens' advantages once more, over the batch or over each group."""
    discount: float = Field(1.0, ge=0.0, le=1.0)
    """Factor per action on the advantage of earlier actions; 0 leaves each what it earns itself."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps per version, or per epoch of one."""
    num_epochs: int = Field(1, ge=1)
    """Number of times that a version learns from its batch, with advantages computed once (PPO's
    epochs)."""
    early_stop_ratio: float | None = Field(None, gt=0.0)
    """A micro-batch whose mean ratio is above this gives no gradient; the step is taken nevertheless.
    Micro-batches that the ranks compute at the same time are one, and stop together; which tokens
    these are depends on `trainer.max_tokens_per_mb`. None stops none."""
    early_stop_kl: float | None = Field(None, gt=0.0)
    """The same for the estimate (k3) of KL(proximal || policy), in nats per token."""
    mask_truncated: bool = False
    """Leave trajectories that ran into `max_new_tokens` out of the loss."""
    zero_truncated: bool = False
    """Give trajectories that ran into `max_new_tokens` the reward 0, whatever their score."""
    truncated_reward_scale: float = Field(1.0, ge=0.0, le=1.0)
    """Factor on rewards above 0 of trajectories that ran into `max_new_tokens` (the stop-properly penalty
    of ProRL v2 and NeMo-RL); 1 has no penalty. Rewards below 0 stay, as they would gain by it."""
    length_penalty: LengthPenaltyConfig | None = None
    """Reward short responses among siblings; None rewards none."""
    overlong: OverlongConfig | None = None
    """Penalty on long responses; None has none."""
    dense_rewards: Literal["none", "score", "gain"] = "none"
    """In place of the trajectory's reward, each action earns the score of the text that it leads to
    (`score`), or what that is above the score before it (`gain`), within `reward_clip`. Wants a score
    after every token, and an estimator that compares no trajectories."""
    reward_scaling: float = 1.0
    """Factor on the score, after `reward_bias`."""
    reward_bias: float = 0.0
    """Added to the score before scaling."""
    reward_clip: float = Field(20.0, gt=0.0)
    """Bound on the absolute value of a reward."""

    def check_batch(self, num_prompts: int) -> None:
        """
        Raises:
            ValueError: a batch has fewer prompts than mini-batches.
        """
        if self.num_minibatches > num_prompts:
            raise ValueError(
                f"algorithm.num_minibatches={self.num_minibatches} exceeds "
                f"data.batch_size={num_prompts} prompts; a mini-batch holds whole groups"
            )

    @property
    def has_proximal_pass(self) -> bool:
        """True if the policy is asked for its logprobs before it is updated.

        Where a version is one update, the logprobs of that update's own forward are the same.
        """
        is_one_update = self.num_minibatches * self.num_epochs == 1
        is_read_before = (
            self.m2_threshold is not None
            or self.behaviour_weight_normalize
            or self.policy_loss.asks_policy_first
            or self.distillation_coef > 0
            or (self.kl_coef > 0 and self.kl_in == "reward")
        )
        is_recomputed = self.decoupled and self.proximal == "recompute"
        return is_recomputed and (is_read_before or not is_one_update)

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        conflicts = (
            *self._loss_conflicts(),
            *self._kl_conflicts(),
            *self._reward_conflicts(),
            *self._correction_conflicts(),
        )
        for is_wrong, message in conflicts:
            if is_wrong:
                raise ValueError(message)
        return self

    def _loss_conflicts(self) -> tuple[tuple[bool, str], ...]:
        is_normed = self.aggregation == "sequence_mean_token_sum_norm"
        loss = self.policy_loss
        return (
            (
                is_normed and self.aggregation_max_tokens is None,
                "aggregation=sequence_mean_token_sum_norm divides by aggregation_max_tokens; set it",
            ),
            (
                not is_normed and self.aggregation_max_tokens is not None,
                "aggregation_max_tokens belongs to aggregation=sequence_mean_token_sum_norm",
            ),
            (
                loss.needs_behaviour_ratio and self.decoupled,
                f"policy_loss.type={loss.type} takes the ratio to the behaviour policy; "
                "set decoupled=false",
            ),
            (
                not loss.has_sequence_ratio and self.ratio_level == "sequence",
                f"policy_loss.type={loss.type} reads no ratio of sequences; set ratio_level=token",
            ),
        )

    def _kl_conflicts(self) -> tuple[tuple[bool, str], ...]:
        return (
            (
                self.kl_estimator == "k1"
                and self.kl_coef > 0
                and self.kl_in == "loss"
                and not self.kl_straight_through,
                "kl_estimator=k1 as a loss has a gradient of expectation 0; set kl_straight_through",
            ),
            (
                self.kl_in == "reward" and self.kl_coef == 0,
                "kl_in=reward takes nothing off the rewards; set kl_coef above 0",
            ),
            (
                self.kl_in == "reward" and self.kl_straight_through,
                "kl_straight_through chooses a gradient, and a penalty in the reward has none",
            ),
            (
                self.kl_bias_correction and (self.kl_coef == 0 or self.kl_in == "reward"),
                "kl_bias_correction weighs the penalty in the loss; set kl_coef, and kl_in=loss",
            ),
            (
                self.kl_bias_correction and self.kl_straight_through,
                "kl_bias_correction has a gradient of its own; leave out kl_straight_through",
            ),
            (
                self._is_set("kl_bound") and self.kl_coef == 0,
                "kl_bound bounds nothing while kl_coef=0; set it, or leave it out",
            ),
            (
                self.kl_target is not None and self.kl_in != "reward",
                "kl_target moves the coefficient of the penalty in the reward; set kl_in=reward",
            ),
            (
                self.kl_target is None and self._is_set("kl_horizon"),
                "kl_horizon belongs to kl_target",
            ),
        )

    def _reward_conflicts(self) -> tuple[tuple[bool, str], ...]:
        names: tuple[str, ...]
        names = ("zero_truncated", "truncated_reward_scale", "overlong", "length_penalty")
        names += ("reward_scaling", "reward_bias")
        chosen = [name for name in names if self._is_set(name)]
        is_dense = self.dense_rewards != "none"
        return (
            (
                self.zero_truncated and self.truncated_reward_scale != 1.0,
                f"truncated_reward_scale={self.truncated_reward_scale} scales what zero_truncated sets "
                "to 0; leave one out",
            ),
            (
                is_dense and bool(chosen),
                f"{', '.join(chosen)}: shape the score of a trajectory, which dense_rewards replaces",
            ),
            (
                is_dense and self.advantage.compares_trajectories,
                f"advantage.type={self.advantage.type} compares whole trajectories; with dense_rewards "
                "set advantage.type=reward, or gae with a critic",
            ),
        )

    def _correction_conflicts(self) -> tuple[tuple[bool, str], ...]:
        low, cap, loss = self.behaviour_weight_floor, self.behaviour_weight_cap, self.policy_loss
        names: tuple[str, ...]
        names = ("behaviour_weight_floor", "behaviour_weight_action", "behaviour_weight_level")
        names += ("behaviour_weight_normalize",)
        names += ("proximal", "rejection", "m2_threshold")
        chosen = [name for name in names if self._is_set(name)]
        whole = [n for n in ("m2_threshold", "behaviour_weight_normalize") if self._is_set(n)]
        whole += [f"policy_loss.type={loss.type}"] if loss.asks_policy_first else []
        return (
            (
                not self.decoupled and bool(chosen),
                f"{', '.join(chosen)}: without decoupled nothing is weighed by proximal / behaviour",
            ),
            (
                self.proximal != "recompute" and bool(whole),
                f"{', '.join(whole)}: look at a batch before its updates; set proximal=recompute",
            ),
            (
                low is not None and cap is not None and low > cap,
                f"behaviour_weight_floor={low} exceeds behaviour_weight_cap={cap}",
            ),
            (
                self.behaviour_weight_action == "clamp" and low is None and cap is None,
                "behaviour_weight_action=clamp needs behaviour_weight_cap or behaviour_weight_floor",
            ),
        )

    def _is_set(self, name: str) -> bool:
        """True if a field differs from its default: a resolved file spells out every field."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)


class PPOAlgorithmConfig(AlgorithmConfig):
    """Algorithm with a critic, which takes the place of a baseline."""

    advantage: CriticAdvantageConfig = GAEAdvantageConfig()
    """How rewards and the critic's values become advantages."""
    advantage_norm: Literal["none", "batch", "group"] = "batch"
    """Centre and scale the tokens' advantages, over the batch or over each group."""
