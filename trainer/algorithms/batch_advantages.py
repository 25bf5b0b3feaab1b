"""Advantages and returns of a whole batch, computed from its rewards before any model learns from it."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.errors import ConfigError
from headway.contracts.types import PolicyVersion
from trainer.algorithms.advantage_registry import RewardedBatch, chosen_estimator
from trainer.algorithms.aggregation import masked_mean
from trainer.algorithms.diagnostics import Mismatch
from trainer.algorithms.distillation import distillation_advantages
from trainer.algorithms.importance_weights import (
    behaviour_weights,
    normalizing_factor,
    proximal_shares,
    within_second_moment,
)
from trainer.algorithms.kl import kl_estimate
from trainer.algorithms.policy_loss_registry import PREPARED, BatchTokens, chosen_policy_loss
from trainer.algorithms.ratios import log_ratios
from trainer.algorithms.rewards import dense_token_rewards
from trainer.algorithms.segments import Segments
from trainer.algorithms.token_advantages import normalized_advantages, trajectory_rewards
from trainer.batching.sequences import SequenceBatch

Metrics = dict[str, float]


def compute_advantages(
    config: AlgorithmConfig, batch: SequenceBatch, version: PolicyVersion, kl_coef: float
) -> tuple[SequenceBatch, Metrics]:
    """Add to a batch the columns that the losses need, as configured; the same on every rank.

    Args:
        batch: whole prompt groups, with the columns of `batch_of_trajectories`; `dense_scores` [T], of
            the text that ends with each token, where rewards are dense; and of each model that was
            asked: `proximal_logprobs` and `entropy`, `reference_logprobs`, `teacher_logprobs`;
            `values` in units of the rewards, with which advantages are generalised (GAE).
        version: version of the weights that the step starts from.
        kl_coef: of the penalty in the rewards; only where `kl_in` is reward.
    Returns:
        The batch with `advantages`; `returns` where there are values; `loss_mask`, the actions without
        what is left out; `prepared` where the policy loss has a `prepare`; `proximal_shares` where
        proximal logprobs are interpolated; `near` and `weight_factor` where `m2_threshold` and
        `behaviour_weight_normalize` ask for them. And metrics:
        `logprob_diff_mean`, `logprob_diff_max` (nats) and `effective_sample_size` where the proximal
        logprobs were computed, and `entropy` (nats per token), unless the loss reports it;
        `reference_kl` (nats per token) and `kl_coef` where it is in the rewards; `teacher_kl`, minus the
        mean of teacher - policy.
    """
    sequences = Segments.of_lengths(batch.lengths)
    actions = batch["action_mask"]
    policy = batch.columns.get("proximal_logprobs", batch["behaviour_logprobs"])
    metrics: Metrics = {}
    kl = None
    if config.kl_in == "reward":
        reference = batch["reference_logprobs"]
        kl = kl_estimate(policy, reference, config.kl_estimator, config.kl_bound)
        counted = actions & ~batch["truncated"] if config.mask_truncated else actions
        metrics |= {"reference_kl": float(masked_mean(kl, counted)), "kl_coef": kl_coef}
    batch = _credited(config, batch, sequences, kl, kl_coef)
    mask = batch["loss_mask"]
    if "teacher_logprobs" in batch.columns:
        gain = distillation_advantages(policy, batch["teacher_logprobs"])
        gain = torch.where(mask, gain, 0.0)
        metrics["teacher_kl"] = -float(masked_mean(gain, mask))
        batch = batch.with_columns(advantages=batch["advantages"] + config.distillation_coef * gain)
    batch = _prepared(config, batch, policy, version)
    batch, corrected = _corrected(config, batch, version)
    return batch, metrics | corrected


def _prepared(
    config: AlgorithmConfig, batch: SequenceBatch, policy: Tensor, version: PolicyVersion
) -> SequenceBatch:
    """Add what the policy loss computes over the whole batch, if it does."""
    loss, args = chosen_policy_loss(config.policy_loss)
    if loss.prepare is None:
        return batch
    mask, sequences = batch["loss_mask"], Segments.of_lengths(batch.lengths)
    logprobs = torch.where(mask, policy, 0.0)
    advantages = torch.where(mask, batch["advantages"], 0.0)
    tokens = BatchTokens(logprobs, advantages, mask, sequences, version)
    return batch.with_columns(**{PREPARED: loss.prepare(args, tokens)})


def _credited(
    config: AlgorithmConfig,
    batch: SequenceBatch,
    sequences: Segments,
    kl: Tensor | None,
    kl_coef: float,
) -> SequenceBatch:
    """Add advantages, and returns where there are values; what is left out is removed from the mask."""
    mask, truncated = batch["action_mask"], batch.per_sequence("truncated")
    groups, counts = batch.per_sequence("group"), batch.per_sequence("is_sample")
    scores = batch.per_sequence("scores")
    rewarded = RewardedBatch(
        rewards=trajectory_rewards(
            config, scores, sequences.sizes(mask), truncated, Segments.of_names(groups), counts
        ),
        group_ids=groups,
        counts=counts,
        truncated=truncated,
        loss_mask=mask,
        sequences=sequences,
        is_greedy=batch.per_sequence("is_greedy") if "is_greedy" in batch.columns else None,
        discount=config.discount,
        kl_penalty=None if kl is None else kl_coef * kl,
        dense_rewards=_dense_rewards(config, batch),
        values=batch.columns.get("values"),
    )
    estimator, args = chosen_estimator(config.advantage)
    estimate = estimator.compute(args, rewarded)
    if estimate.returns is not None:
        batch = batch.with_columns(returns=estimate.returns)
    elif rewarded.values is not None:
        raise ConfigError(
            f"the batch has a critic's values, and advantage.type={config.advantage.type} gives no "
            "returns that it could learn; set advantage.type=gae"
        )
    if config.mask_truncated:
        mask = mask & ~batch["truncated"]
    advantages = normalized_advantages(config, estimate.advantages, groups, mask, sequences)
    return batch.with_columns(advantages=advantages, loss_mask=mask)


def _weight_factor(config: AlgorithmConfig, batch: SequenceBatch, logs: Tensor) -> Tensor:
    """[T] the same everywhere, by which the weights are multiplied."""
    mask, sequences = batch["loss_mask"], Segments.of_lengths(batch.lengths)
    level, action = config.behaviour_weight_level, config.behaviour_weight_action
    bounds = (config.behaviour_weight_floor, config.behaviour_weight_cap)
    weights, _ = behaviour_weights(logs, mask, sequences, level, *bounds, action)
    return torch.full_like(logs, normalizing_factor(weights, mask, sequences, level))


def _dense_rewards(config: AlgorithmConfig, batch: SequenceBatch) -> Tensor | None:
    """[T] in place of what a whole trajectory earned, if configured; the KL's penalty stays."""
    if config.dense_rewards == "none":
        return None
    is_gain = config.dense_rewards == "gain"
    columns = (batch["dense_scores"], batch["action_mask"])
    return dense_token_rewards(*columns, config.reward_clip, is_gain)


def _corrected(
    config: AlgorithmConfig, batch: SequenceBatch, version: PolicyVersion
) -> tuple[SequenceBatch, Metrics]:
    """Add what the loss needs to know about behaviour and proximal policy."""
    if not config.decoupled:
        return batch, {}
    if config.proximal != "recompute":
        shares = proximal_shares(batch["behaviour_versions"], version)
        return batch.with_columns(proximal_shares=shares), {}
    if not config.has_proximal_pass and "proximal_logprobs" not in batch.columns:
        return batch, {}  # the only update's own forward computes them
    proximal, behaviour = batch["proximal_logprobs"], batch["behaviour_logprobs"]
    mask = batch["loss_mask"]
    mismatch = Mismatch.of(proximal, behaviour, mask)
    logs = log_ratios(proximal, behaviour, mask)
    if config.m2_threshold is not None:
        batch = batch.with_columns(near=within_second_moment(logs, mask, config.m2_threshold))
    if config.behaviour_weight_normalize:
        batch = batch.with_columns(weight_factor=_weight_factor(config, batch, logs))
    metrics = {
        "logprob_diff_mean": mismatch.mean_distance,
        "logprob_diff_max": mismatch.max_distance,
        "effective_sample_size": mismatch.effective_sample_size,
    }
    if config.entropy_coef == 0:  # else the loss reports it
        metrics["entropy"] = float(masked_mean(batch["entropy"], mask))
    return batch, metrics
