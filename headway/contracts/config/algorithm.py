"""Policy optimisation: rewards, advantages, the policy loss and its corrections, each chosen by name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headway.contracts.config.base import Config


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


class RejectionConfig(Config):
    """Tokens, or whole sequences, that are too far from the behaviour policy leave the loss; they stay
    in its denominator."""

    metric: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """`ratio` = proximal / behaviour, or an estimate of KL(behaviour || proximal) in nats."""
    level: Literal["token", "sequence"] = "sequence"
    """Judge each token, or the sequence by one number."""
    statistic: Literal["mean", "sum", "max"] = "mean"
    """Of a sequence's tokens; of `ratio` in log space, so that `mean` is the geometric mean and `sum` the
    ratio of whole responses."""
    lower: float | None = None
    """What lies below is rejected; None has no bound."""
    upper: float | None = None
    """What lies above is rejected; None has no bound."""

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
    objective: Literal["clip", "unclipped", "cispo", "sapo"] = "clip"
    """`clip` is PPO's minimum of plain and clipped (arXiv:1707.06347), `unclipped` ratio · advantage,
    `cispo` clips the weight but not the gradient (arXiv:2506.13585), `sapo` is a soft gate
    (arXiv:2511.20347)."""
    ratio_level: Literal["token", "sequence"] = "token"
    """`sequence`: one ratio per response, the geometric mean of its tokens' (GSPO, arXiv:2507.18071)."""
    eps_clip: float = Field(0.2, gt=0.0, le=1.0)
    """Lower and, without `eps_clip_higher`, upper clip range of the ratio (PPO, arXiv:1707.06347); 1 has
    no lower bound. Of `clip` and `cispo`."""
    eps_clip_higher: float | None = Field(None, gt=0.0)
    """Upper clip range of its own (DAPO, arXiv:2503.14476); None takes `eps_clip`."""
    dual_clip: float | None = Field(None, gt=1.0)
    """Bound on the ratio where the advantage is negative (arXiv:1912.09729); None has none. Of `clip`."""
    sapo_temperature_positive: float = Field(1.0, gt=0.0)
    """Steepness of SAPO's gate where the advantage is positive."""
    sapo_temperature_negative: float = Field(1.05, gt=0.0)
    """Steepness of SAPO's gate elsewhere."""
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
    kl_straight_through: bool = False
    """The estimate's value with the gradient of k2, which is that of the KL; k1 needs it."""
    decoupled: bool = True
    """Clip around the proximal policy and weigh by proximal / behaviour (AReaL, arXiv:2505.24298);
    false clips around the behaviour policy itself."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """`recompute` asks the policy before its first update; where a version is one update, that one's own
    forward tells, and no other is made. `interpolate` saves it for good: the proximal logprobs are
    guessed on the line from behaviour to current, by the token's version (AReaL's loglinear
    approximation). Needs `decoupled`."""
    behaviour_weight_cap: float | None = Field(5.0, gt=0.0)
    """Tokens with proximal / behaviour above this get weight 0; None keeps all. Needs `decoupled`."""
    behaviour_weight_floor: float | None = Field(None, gt=0.0)
    """The same below this; with the cap it is IcePop's band (arXiv:2510.18855). Needs `decoupled`."""
    behaviour_weight_action: Literal["mask", "clamp"] = "mask"
    """`clamp` moves weights to cap and floor in place of 0 (truncated importance sampling)."""
    behaviour_weight_level: Literal["token", "geometric", "sequence"] = "token"
    """The weight of the token, or of its whole sequence: geometric mean, or product."""
    rejection: RejectionConfig | None = None
    """Leave out what is too far from the behaviour policy. Needs `decoupled`."""
    m2_threshold: float | None = Field(None, gt=0.0)
    """Leave out the tokens with the largest log(proximal / behaviour)² of a batch until its mean is below
    this (M2PO, arXiv:2510.01161); None keeps all. Needs `decoupled`."""
    distillation_coef: float = Field(0.0, ge=0.0)
    """Weight of log(teacher / policy) in each token's advantage, in nats (on-policy distillation,
    arXiv:2306.08543); above 0 a `teacher` is needed. `reward_scaling: 0` learns from it alone."""
    baseline: Literal["group", "leave_one_out", "none"] = "group"
    """Taken off the rewards: the mean of the group (GRPO), of the siblings (RLOO, arXiv:2402.14740), or
    nothing (REINFORCE++, arXiv:2501.03262, with `advantage_norm: batch`)."""
    scale_by_std: bool = True
    """Divide centred rewards by the group's standard deviation (GRPO); false only centres (Dr. GRPO).
    Without a baseline nothing is divided."""
    unbiased_std: bool = True
    """That deviation divides squares by one less than the number of rewards (TRL, verl, AReaL); false
    divides by their number. In groups of one size it is a constant factor."""
    scale_level: Literal["group", "batch"] = "group"
    """`batch`: divide by the standard deviation of all rewards instead (LitePPO, arXiv:2508.08221)."""
    advantage_norm: Literal["none", "batch", "group"] = "none"
    """Centre and scale the tokens' advantages once more, over the batch or over each group."""
    discount: float = Field(1.0, ge=0.0, le=1.0)
    """Factor per action on the advantage of earlier actions; 0 leaves each what it earns itself."""
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Generalised advantages (arXiv:1506.02438): 0 trusts the critic after one action, 1 only what was
    earned. Needs a `critic`."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps per version, or per epoch of one."""
    num_epochs: int = Field(1, ge=1)
    """Times that a version learns from its batch, judged once (PPO's epochs)."""
    early_stop_ratio: float | None = Field(None, gt=0.0)
    """A micro-batch whose mean ratio is above this gives no gradient; the step is taken nevertheless.
    What is stopped depends on how ranks and `trainer.max_tokens_per_mb` cut a batch; None stops none."""
    early_stop_kl: float | None = Field(None, gt=0.0)
    """The same for the estimate (k3) of KL(proximal || policy), in nats per token."""
    mask_truncated: bool = False
    """Leave trajectories that ran into `max_new_tokens` out of the loss."""
    zero_truncated: bool = False
    """Give trajectories that ran into `max_new_tokens` the reward 0, whatever their score."""
    overlong: OverlongConfig | None = None
    """Penalty on long responses; None has none."""
    dense_rewards: Literal["none", "score", "gain"] = "none"
    """In place of the trajectory's reward, each action earns the score of the text that it leads to
    (`score`), or what that is above the score before it (`gain`), within `reward_clip`. Wants a score
    after every token, and no baseline."""
    reward_scaling: float = 1.0
    """Factor on the score, after `reward_bias`."""
    reward_bias: float = 0.0
    """Added to the score before scaling."""
    reward_clip: float = Field(20.0, gt=0.0)
    """Bound on the absolute value of a reward."""

    @property
    def has_proximal_pass(self) -> bool:
        """Whether the policy is asked for its logprobs before it is updated.

        Where a version is one update, the logprobs of that update's own forward are the same.
        """
        is_one_update = self.num_minibatches * self.num_epochs == 1
        is_read_before = (
            self.m2_threshold is not None
            or self.distillation_coef > 0
            or (self.kl_coef > 0 and self.kl_in == "reward")
        )
        is_recomputed = self.decoupled and self.proximal == "recompute"
        return is_recomputed and (is_read_before or not is_one_update)

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        conflicts = (
            *self._loss_conflicts(),
            *self._reward_conflicts(),
            *self._correction_conflicts(),
        )
        for is_wrong, message in conflicts:
            if is_wrong:
                raise ValueError(message)
        return self

    def _loss_conflicts(self) -> tuple[tuple[bool, str], ...]:
        is_normed = self.aggregation == "sequence_mean_token_sum_norm"
        has_range = self.eps_clip_higher is not None or self._is_set("eps_clip")
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
                has_range and self.objective not in ("clip", "cispo"),
                f"objective={self.objective} clips nothing; leave out eps_clip and eps_clip_higher",
            ),
            (
                self.dual_clip is not None and self.objective != "clip",
                f"dual_clip belongs to objective=clip, not {self.objective}",
            ),
            (
                self.objective != "sapo"
                and (
                    self._is_set("sapo_temperature_positive")
                    or self._is_set("sapo_temperature_negative")
                ),
                f"sapo_temperature_* belong to objective=sapo, not {self.objective}",
            ),
            (
                self.objective == "sapo" and self.decoupled,
                "objective=sapo gates the ratio to the behaviour policy; set decoupled=false",
            ),
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
                self.kl_target is not None and self.kl_in != "reward",
                "kl_target moves the coefficient of the penalty in the reward; set kl_in=reward",
            ),
            (
                self.kl_target is None and self._is_set("kl_horizon"),
                "kl_horizon belongs to kl_target",
            ),
            (
                self.scale_level == "batch" and not (self.scale_by_std and self.baseline != "none"),
                "scale_level=batch needs scale_by_std and a baseline",
            ),
        )

    def _reward_conflicts(self) -> tuple[tuple[bool, str], ...]:
        names = ("zero_truncated", "overlong", "reward_scaling", "reward_bias")
        chosen = [name for name in names if self._is_set(name)]
        is_dense = self.dense_rewards != "none"
        return (
            (
                is_dense and bool(chosen),
                f"{', '.join(chosen)}: shape the score of a trajectory, which dense_rewards replaces",
            ),
            (
                is_dense and self.baseline != "none",
                f"baseline={self.baseline} is of whole trajectories; with dense_rewards set "
                "baseline=none",
            ),
        )

    def _correction_conflicts(self) -> tuple[tuple[bool, str], ...]:
        low, cap = self.behaviour_weight_floor, self.behaviour_weight_cap
        names: tuple[str, ...]
        names = ("behaviour_weight_floor", "behaviour_weight_action", "behaviour_weight_level")
        names += ("proximal", "rejection", "m2_threshold")
        chosen = [name for name in names if self._is_set(name)]
        return (
            (
                not self.decoupled and bool(chosen),
                f"{', '.join(chosen)}: without decoupled nothing is weighed by proximal / behaviour",
            ),
            (
                self.proximal == "interpolate" and self.m2_threshold is not None,
                "m2_threshold judges a batch before its updates; set proximal=recompute",
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
        """Whether a field differs from its default: a resolved file spells out every field."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)


class PPOAlgorithmConfig(AlgorithmConfig):
    """With a critic, which takes the place of a baseline."""

    baseline: Literal["none"] = "none"
    """The critic's values are the baseline."""
    advantage_norm: Literal["none", "batch", "group"] = "batch"
    """Centre and scale the tokens' advantages, over the batch or over each group."""
