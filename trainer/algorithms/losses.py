"""The losses of a step, put together from their parts as the configuration says."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.contracts.config.algorithm import AlgorithmConfig
from trainer.algorithms.aggregation import (
    AggregationMode,
    aggregate,
    aggregation_weight,
    masked_mean,
    mean_mode,
)
from trainer.algorithms.corrections import accepted, behaviour_weights, interpolated_proximal
from trainer.algorithms.early_stop import is_too_far
from trainer.algorithms.kl import kl_estimate
from trainer.algorithms.objectives import cispo_objective, clipped_objective, sapo_objective
from trainer.algorithms.ratios import RatioLevel, at_level, bounded_exp, log_ratios
from trainer.algorithms.segments import Segments
from trainer.batching.sequences import SequenceBatch

SQUARE_WEIGHT = "behaviour_weight_square"
"""A figure that `effective_sample_size` is made of."""


def sft_loss(logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Mean negative log-likelihood.

    Args:
        logprobs: [T] of the labels.
        loss_mask: [T] bool, true = in the loss.
    Returns:
        [] float64.
    """
    return -masked_mean(logprobs, loss_mask)


def policy_loss(
    config: AlgorithmConfig,
    batch: SequenceBatch,
    logprobs: Tensor,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Of a micro-batch: minus the weighted objective, minus the entropy bonus, plus the KL penalty.

    With `objective=clip` and `decoupled` it is AReaL (arXiv:2505.24298) eq. 5; with proximal = behaviour,
    PPO (arXiv:1707.06347).

    Args:
        batch: columns `loss_mask`, `advantages`, `behaviour_logprobs`; `proximal_logprobs` (see
            `is_judged_by_update`; without `decoupled` the behaviour's stand in), or
            `proximal_shares` where `proximal` is interpolated;
            `reference_logprobs` where the KL is in the loss; `near` (of `within_second_moment` over the
            batch) where `m2_threshold` is set.
        logprobs: [T] under the current policy, differentiable.
        entropy: [T] of the current policy, differentiable; wanted where `entropy_coef` > 0, elsewhere
            only a figure.
    Returns:
        loss [] and means over the same tokens, in float64: `clip_fraction` (of these `clip_fraction_low`
        with a ratio below 1 and `clip_fraction_high` above), `behaviour_weight` (proximal / behaviour,
        unbounded), `capped_fraction` (tokens without weight, or with a bounded one), `behaviour_kl` (k3
        estimate of KL(behaviour || proximal)), `ratio` (policy / proximal, or its sequence's) and
        `update_kl` (k3 estimate of KL(proximal || policy)); `entropy` where it is given, and
        `reference_kl` where it is in the loss; those of `_first_figures` where `is_judged_by_update`;
        where one stops early, `stopped_fraction`, whose loss is 0 and has no gradient. Averaged by
        `policy_loss_weight` all are exact over micro-batches and ranks.
    """
    mask = batch["loss_mask"]
    sequences = Segments.of_lengths(batch.lengths, mask.device)
    # What stands outside of the mask may be infinite, and is nobody's gradient.
    logprobs = torch.where(mask, logprobs, 0.0)
    behaviour = batch["behaviour_logprobs"]
    is_first = is_judged_by_update(config, batch)
    batch = batch.with_columns(proximal_logprobs=_proximal(config, batch, logprobs))
    objective, is_clipped, ratio = _objective(config, batch, logprobs, sequences)
    log_weight = log_ratios(batch["proximal_logprobs"], behaviour, mask)
    weights, is_within = _weights(config, batch, log_weight, sequences)
    log_update = log_ratios(logprobs.detach(), batch["proximal_logprobs"], mask)
    penalties, penalty_figures = _penalties(config, batch, logprobs, entropy)
    losses = -weights * objective + penalties
    figures = penalty_figures | {
        "clip_fraction": is_clipped.float(),
        "clip_fraction_low": (is_clipped & (ratio < 1)).float(),
        "clip_fraction_high": (is_clipped & (ratio > 1)).float(),
        "behaviour_weight": bounded_exp(log_weight),
        "capped_fraction": (~is_within).float(),
        "behaviour_kl": bounded_exp(log_weight) - 1.0 - log_weight,
        "ratio": ratio,
        "update_kl": bounded_exp(log_update) - 1.0 - log_update,
    }
    loss = aggregate(losses, mask, sequences, config.aggregation, config.aggregation_max_tokens)
    with torch.no_grad():
        mode = mean_mode(config.aggregation)
        stats = {name: aggregate(v, mask, sequences, mode) for name, v in figures.items()}
        if is_first:
            stats |= _first_figures(log_weight, mask, sequences, mode)
    max_ratio, max_kl = config.early_stop_ratio, config.early_stop_kl
    if max_ratio is not None or max_kl is not None:
        is_stopped = is_too_far(stats["ratio"], stats["update_kl"], max_ratio, max_kl)
        loss = torch.where(is_stopped, 0.0, loss)
        stats["stopped_fraction"] = is_stopped.to(loss.dtype)
    return loss, stats


def policy_loss_weight(config: AlgorithmConfig, batch: SequenceBatch) -> float:
    """Weight of a micro-batch's `policy_loss`: its tokens, or its sequences, in the loss."""
    mask = batch["loss_mask"]
    sequences = Segments.of_lengths(batch.lengths, mask.device)
    return aggregation_weight(mask, sequences, config.aggregation)


def is_judged_by_update(config: AlgorithmConfig, batch: SequenceBatch) -> bool:
    """Whether the current logprobs are the proximal ones, too: a version's only update tells them, and
    nobody was asked before."""
    is_asked = config.has_proximal_pass or "proximal_logprobs" in batch.columns
    return config.decoupled and config.proximal == "recompute" and not is_asked


def _proximal(config: AlgorithmConfig, batch: SequenceBatch, logprobs: Tensor) -> Tensor:
    """[T] logprobs before the first update."""
    behaviour = batch["behaviour_logprobs"]
    if config.proximal == "interpolate":
        return interpolated_proximal(logprobs, behaviour, batch["proximal_shares"])
    if is_judged_by_update(config, batch):
        return logprobs.detach()
    is_behaviour = not config.decoupled and "proximal_logprobs" not in batch.columns
    return behaviour if is_behaviour else batch["proximal_logprobs"]


def _first_figures(
    log_weight: Tensor, mask: Tensor, sequences: Segments, mode: AggregationMode
) -> dict[str, Tensor]:
    """What `diagnostics.Mismatch` tells where the policy was asked before: means of |log w| and of w²,
    and the largest |log w|."""
    distance = torch.where(mask, log_weight.abs(), 0.0)
    square = bounded_exp(log_weight).double().square()
    return {
        "logprob_diff_mean": aggregate(distance, mask, sequences, mode),
        "logprob_diff_max": distance.max().double(),
        SQUARE_WEIGHT: aggregate(square, mask, sequences, mode),
    }


def _objective(
    config: AlgorithmConfig, batch: SequenceBatch, logprobs: Tensor, sequences: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    """[T], whether each token was clipped, and its ratio, or its sequence's."""
    mask = batch["loss_mask"]
    advantages = torch.where(mask, batch["advantages"], 0.0)
    level: RatioLevel = "geometric" if config.ratio_level == "sequence" else "token"
    logs = at_level(log_ratios(logprobs, batch["proximal_logprobs"], mask), mask, sequences, level)
    if config.ratio_level == "sequence":
        means = sequences.means(advantages, mask)[sequences.index]
        advantages = torch.where(mask, means.to(advantages.dtype), 0.0)
    ratio = bounded_exp(logs)
    low, high = config.eps_clip, config.eps_clip_higher
    if config.objective == "clip":
        return *clipped_objective(ratio, advantages, low, high, config.dual_clip), ratio
    if config.objective == "cispo":
        return *cispo_objective(ratio, logprobs, advantages, low, high), ratio
    nothing = torch.zeros_like(mask)
    if config.objective == "sapo":
        positive, negative = config.sapo_temperature_positive, config.sapo_temperature_negative
        return sapo_objective(ratio, advantages, positive, negative), nothing, ratio
    return ratio * advantages, nothing, ratio


def _weights(
    config: AlgorithmConfig, batch: SequenceBatch, log_weight: Tensor, sequences: Segments
) -> tuple[Tensor, Tensor]:
    """[T] of the behaviour policy, and whether each was left as it was."""
    mask = batch["loss_mask"]
    if not config.decoupled:
        return torch.ones_like(log_weight), torch.ones_like(mask)
    weights, is_within = behaviour_weights(
        log_weight,
        mask,
        sequences,
        config.behaviour_weight_level,
        config.behaviour_weight_floor,
        config.behaviour_weight_cap,
        config.behaviour_weight_action,
    )
    is_near = torch.ones_like(mask)
    if config.rejection is not None:
        rule = config.rejection
        is_near &= accepted(
            log_weight,
            mask,
            sequences,
            rule.metric,
            rule.level,
            rule.statistic,
            rule.lower,
            rule.upper,
        )
    if config.m2_threshold is not None:
        is_near &= batch["near"]
    return torch.where(is_near, weights, 0.0), is_within & is_near


def _penalties(
    config: AlgorithmConfig, batch: SequenceBatch, logprobs: Tensor, entropy: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """[T] to be added to the losses, and what they are made of."""
    mask, figures = batch["loss_mask"], {}
    penalties = torch.zeros_like(logprobs)
    if entropy is not None:
        figures["entropy"] = torch.where(mask, entropy, 0.0)
    elif config.entropy_coef > 0:
        raise ValueError("entropy_coef is above 0 and no entropy was handed in")
    if config.entropy_coef > 0:
        penalties = penalties - config.entropy_coef * figures["entropy"]
    if config.kl_coef > 0 and config.kl_in == "loss":
        reference = torch.where(mask, batch["reference_logprobs"], 0.0)
        figures["reference_kl"] = kl_estimate(
            logprobs, reference, config.kl_estimator, straight_through=config.kl_straight_through
        )
        penalties = penalties + config.kl_coef * figures["reference_kl"]
    return penalties, figures
