"""The judgement of a whole batch, before any model learns from it: rewards -> advantages and returns."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.types import PolicyVersion
from trainer.algorithms.advantages import discounted_returns, generalized_advantages
from trainer.algorithms.aggregation import masked_mean
from trainer.algorithms.corrections import proximal_shares, within_second_moment
from trainer.algorithms.credit import normalized_advantages, token_advantages, trajectory_rewards
from trainer.algorithms.diagnostics import Mismatch
from trainer.algorithms.distillation import distillation_advantages
from trainer.algorithms.kl import kl_estimate
from trainer.algorithms.ratios import log_ratios
from trainer.algorithms.rewards import dense_token_rewards, token_rewards
from trainer.algorithms.segments import Segments
from trainer.batching.sequences import SequenceBatch

Figures = dict[str, float]


def judge(
    config: AlgorithmConfig, batch: SequenceBatch, version: PolicyVersion, kl_coef: float
) -> tuple[SequenceBatch, Figures]:
    """What the losses want of a batch, as the configuration says; the same on every rank.

    Args:
        batch: whole prompt groups, with the columns of `batch_of_trajectories`; `dense_scores` [T], of
            the text that ends with each token, where rewards are dense; and of each model that was
            asked: `proximal_logprobs` and `entropy`, `reference_logprobs`, `teacher_logprobs`;
            `values` in units of the rewards, with which advantages are generalised (GAE).
        version: of the weights that the step starts from.
        kl_coef: of the penalty in the rewards; only where `kl_in` is reward.
    Returns:
        The batch with `advantages`; `returns` where there are values; `loss_mask`, the actions without
        what is left out; `proximal_shares` where proximal logprobs are interpolated; `near` where
        `m2_threshold` asks for it. And figures: `logprob_diff_mean`, `logprob_diff_max` (nats)
        and `effective_sample_size` where the proximal logprobs were computed, and `entropy` (nats per
        token), unless the loss tells it; `reference_kl` (nats per token) and `kl_coef` where it is in the
        rewards; `teacher_kl`, minus the mean of teacher - policy.
    """
    sequences = Segments.of_lengths(batch.lengths)
    actions = batch["action_mask"]
    policy = batch.columns.get("proximal_logprobs", batch["behaviour_logprobs"])
    figures: Figures = {}
    kl = None
    if config.kl_in == "reward":
        kl = kl_estimate(policy, batch["reference_logprobs"], config.kl_estimator)
        counted = actions & ~batch["truncated"] if config.mask_truncated else actions
        figures |= {"reference_kl": float(masked_mean(kl, counted)), "kl_coef": kl_coef}
    batch = _credited(config, batch, sequences, kl, kl_coef)
    mask = batch["loss_mask"]
    if "teacher_logprobs" in batch.columns:
        gain = distillation_advantages(policy, batch["teacher_logprobs"])
        gain = torch.where(mask, gain, 0.0)
        figures["teacher_kl"] = -float(masked_mean(gain, mask))
        batch = batch.with_columns(advantages=batch["advantages"] + config.distillation_coef * gain)
    batch, corrected = _corrected(config, batch, version)
    return batch, figures | corrected


def _credited(
    config: AlgorithmConfig,
    batch: SequenceBatch,
    sequences: Segments,
    kl: Tensor | None,
    kl_coef: float,
) -> SequenceBatch:
    """With advantages, and returns where there are values; what is left out is off the mask."""
    mask, truncated = batch["action_mask"], batch.per_sequence("truncated")
    groups, counts = batch.per_sequence("group"), batch.per_sequence("is_sample")
    scores = batch.per_sequence("scores")
    rewards = trajectory_rewards(config, scores, sequences.sizes(mask), truncated)
    if config.dense_rewards != "none":
        is_gain = config.dense_rewards == "gain"
        dense = dense_token_rewards(batch["dense_scores"], mask, config.reward_clip, is_gain)
        # What a whole trajectory earned counts no more, but the penalty does.
        earned = dense + token_rewards(torch.zeros_like(rewards), mask, sequences, kl, kl_coef)
    elif "values" in batch.columns:
        earned = token_rewards(rewards, mask, sequences, kl, kl_coef)
    if "values" in batch.columns:
        advantages, returns = generalized_advantages(
            earned, batch["values"], mask, sequences, truncated, config.discount, config.gae_lambda
        )
        batch = batch.with_columns(returns=returns)
    elif config.dense_rewards != "none":
        advantages = discounted_returns(earned, mask, sequences, config.discount)
    else:
        advantages = token_advantages(config, rewards, groups, counts, mask, sequences, kl, kl_coef)
    if config.mask_truncated:
        mask = mask & ~batch["truncated"]
    advantages = normalized_advantages(config, advantages, groups, mask, sequences)
    return batch.with_columns(advantages=advantages, loss_mask=mask)


def _corrected(
    config: AlgorithmConfig, batch: SequenceBatch, version: PolicyVersion
) -> tuple[SequenceBatch, Figures]:
    """With what the loss needs to know of behaviour and proximal policy."""
    if not config.decoupled:
        return batch, {}
    if config.proximal == "interpolate":
        shares = proximal_shares(batch["behaviour_versions"], version)
        return batch.with_columns(proximal_shares=shares), {}
    if not config.has_proximal_pass and "proximal_logprobs" not in batch.columns:
        return batch, {}  # the only update's own forward tells them
    proximal, behaviour = batch["proximal_logprobs"], batch["behaviour_logprobs"]
    mask = batch["loss_mask"]
    mismatch = Mismatch.of(proximal, behaviour, mask)
    if config.m2_threshold is not None:
        logs = log_ratios(proximal, behaviour, mask)
        batch = batch.with_columns(near=within_second_moment(logs, mask, config.m2_threshold))
    figures = {
        "logprob_diff_mean": mismatch.mean_distance,
        "logprob_diff_max": mismatch.max_distance,
        "effective_sample_size": mismatch.effective_sample_size,
    }
    if config.entropy_coef == 0:  # else the loss tells it
        figures["entropy"] = float(masked_mean(batch["entropy"], mask))
    return batch, figures
