"""The losses of a step, composed as configured."""

from __future__ import annotations

from collections.abc import Callable

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
from trainer.algorithms.distillation import top_divergence
from trainer.algorithms.early_stop import is_too_far, mean_over_ranks
from trainer.algorithms.importance_weights import (
    accepted,
    behaviour_weights,
    interpolated_proximal,
    is_off_policy,
)
from trainer.algorithms.kl import kl_estimate
from trainer.algorithms.policy_loss_registry import PREPARED, PolicyTokens, chosen_policy_loss
from trainer.algorithms.ratios import at_level, bounded_exp, log_ratios
from trainer.algorithms.segments import Segments
from trainer.batching.sequences import SequenceBatch

SQUARE_WEIGHT = "behaviour_weight_square"
"""A metric from which `effective_sample_size` is computed."""


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
    over_ranks: Callable[[Tensor], Tensor] | None = None,
    top_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's loss: the weighted loss of `policy_loss`, minus the entropy bonus, plus the
    KL penalty and the divergence from the teacher.

    With `policy_loss.type=clip` and `decoupled` it is AReaL (arXiv:2505.24298) eq. 5; with proximal =
    behaviour, PPO (arXiv:1707.06347).

    Args:
        batch: columns `loss_mask`, `advantages`, `behaviour_logprobs`; `proximal_logprobs` (see
            `is_proximal_from_update`; without `decoupled` the behaviour's stand in), or
            `proximal_shares` where `proximal` is interpolated;
            `reference_logprobs` where the KL is in the loss; `near` (of `within_second_moment` over the
            batch) where `m2_threshold` is set; `prepared` where the policy loss has a `prepare`;
            `weight_factor` where `behaviour_weight_normalize` is set; `teacher_top` [T, 2, K], ids and
            logprobs, where `distillation_top_k` is set.
        logprobs: [T] under the current policy, differentiable.
        entropy: [T] of the current policy, differentiable; wanted where `entropy_coef` > 0, elsewhere
            only a metric.
        over_ranks: the sum over all ranks of a small tensor, which every rank asks for once per
            micro-batch: they stop early together. None decides alone.
        top_logprobs: [T, K] of the tokens of `teacher_top`, differentiable; where `distillation_top_k` is
            set.
    Returns:
        loss [] and means over the same tokens, in float64: `clip_fraction` (of these `clip_fraction_low`
        with a ratio below 1 and `clip_fraction_high` above), `behaviour_weight` (proximal / behaviour,
        unbounded), `capped_fraction` (tokens without weight, or with a bounded one), `behaviour_kl` (k3
        estimate of KL(behaviour || proximal)), `ratio` (policy / proximal, or its sequence's) and
        `update_kl` (k3 estimate of KL(proximal || policy)); `entropy` where it is given, and
        `reference_kl` and `teacher_kl` where they are in the loss; those of `_first_metrics` where
        `is_proximal_from_update`;
        where one stops early, `stopped_fraction`, whose loss is 0 and has no gradient. Averaged by
        `policy_loss_weight` all are exact over micro-batches and ranks.
    """
    mask = batch["loss_mask"]
    sequences = Segments.of_lengths(batch.lengths, mask.device)
    # Values outside of the mask may be infinite, and must give no gradient.
    logprobs = torch.where(mask, logprobs, 0.0)
    is_first = is_proximal_from_update(config, batch)
    batch = batch.with_columns(proximal_logprobs=_proximal(config, batch, logprobs))
    tokens = _tokens(config, batch, logprobs, sequences)
    loss, args = chosen_policy_loss(config.policy_loss)
    token_losses, is_clipped = loss.compute(args, tokens)
    log_weight = log_ratios(batch["proximal_logprobs"], batch["behaviour_logprobs"], mask)
    weights, is_within = _weights(config, batch, log_weight, tokens)
    penalties, metrics = _penalties(config, batch, logprobs, entropy)
    if top_logprobs is not None:
        teacher = batch["teacher_top"][:, 1]
        kl = top_divergence(top_logprobs, teacher, config.distillation_divergence)
        metrics["teacher_kl"] = torch.where(mask, kl, 0.0)
        penalties = penalties + config.distillation_coef * metrics["teacher_kl"]
    metrics |= _metrics(tokens, is_clipped, log_weight, is_within)
    losses = weights * token_losses + penalties
    total = aggregate(losses, mask, sequences, config.aggregation, config.aggregation_max_tokens)
    with torch.no_grad():
        mode = mean_mode(config.aggregation)
        stats = {name: aggregate(v, mask, sequences, mode) for name, v in metrics.items()}
        if is_first:
            stats |= _first_metrics(log_weight, mask, sequences, mode)
    if config.early_stop_ratio is None and config.early_stop_kl is None:
        return total, stats
    weight = _counted(config, mask, sequences) * (not batch.is_repeat)
    return _unless_stopped(config, total, stats, weight, over_ranks)


def policy_loss_weight(config: AlgorithmConfig, batch: SequenceBatch) -> float:
    """Weight of a micro-batch's `policy_loss`: its tokens, or its sequences, in the loss."""
    mask = batch["loss_mask"]
    sequences = Segments.of_lengths(batch.lengths, mask.device)
    return aggregation_weight(mask, sequences, config.aggregation)


def _counted(config: AlgorithmConfig, mask: Tensor, sequences: Segments) -> Tensor:
    """[] the same, without waiting for the device."""
    if config.aggregation == "token_mean":
        return mask.sum()
    return (sequences.sizes(mask) > 0).sum()


def is_proximal_from_update(config: AlgorithmConfig, batch: SequenceBatch) -> bool:
    """True if the current logprobs serve as the proximal ones, too: a version has a single update, and
    no pass computed them before it.
    """
    is_asked = config.has_proximal_pass or "proximal_logprobs" in batch.columns
    return config.decoupled and config.proximal == "recompute" and not is_asked


def _proximal(config: AlgorithmConfig, batch: SequenceBatch, logprobs: Tensor) -> Tensor:
    """[T] logprobs before the first update."""
    behaviour = batch["behaviour_logprobs"]
    if config.proximal != "recompute":
        shares, line = batch["proximal_shares"], config.proximal
        return interpolated_proximal(logprobs, behaviour, shares, line)
    if is_proximal_from_update(config, batch):
        return logprobs.detach()
    is_behaviour = not config.decoupled and "proximal_logprobs" not in batch.columns
    return behaviour if is_behaviour else batch["proximal_logprobs"]


def _first_metrics(
    log_weight: Tensor, mask: Tensor, sequences: Segments, mode: AggregationMode
) -> dict[str, Tensor]:
    """Return the metrics of `diagnostics.Mismatch` where no pass over the policy came first: means of
    |log w| and of w², and the largest |log w|.
    """
    distance = torch.where(mask, log_weight.abs(), 0.0)
    square = bounded_exp(log_weight).double().square()
    return {
        "logprob_diff_mean": aggregate(distance, mask, sequences, mode),
        "logprob_diff_max": distance.max().double(),
        SQUARE_WEIGHT: aggregate(square, mask, sequences, mode),
    }


def _tokens(
    config: AlgorithmConfig, batch: SequenceBatch, logprobs: Tensor, sequences: Segments
) -> PolicyTokens:
    """Return what the policy loss sees.

    With `ratio_level: sequence` the ratio has the value of the sequence's, and its gradient is that of
    the token's own logprob: GSPO-token (arXiv:2507.18071, 4.3). That is GSPO where all tokens of a
    sequence have one advantage; where they do not (a critic, a KL in the reward, a discount), each keeps
    its own.
    """
    mask = batch["loss_mask"]
    proximal = batch["proximal_logprobs"]
    logs = log_ratios(logprobs, proximal, mask)
    if config.ratio_level == "sequence":
        own = logs - logs.detach()
        logs = at_level(logs.detach(), mask, sequences, "geometric") + own
    return PolicyTokens(
        logprobs=logprobs,
        log_ratios=logs,
        ratio=bounded_exp(logs),
        proximal_logprobs=torch.where(mask, proximal, 0.0),
        advantages=torch.where(mask, batch["advantages"], 0.0),
        loss_mask=mask,
        sequences=sequences,
        prepared=batch.columns.get(PREPARED),
    )


def _metrics(
    tokens: PolicyTokens, is_clipped: Tensor, log_weight: Tensor, is_within: Tensor
) -> dict[str, Tensor]:
    """[T] of each metric."""
    ratio, mask = tokens.ratio, tokens.loss_mask
    log_update = log_ratios(tokens.logprobs.detach(), tokens.proximal_logprobs, mask)
    return {
        "clip_fraction": is_clipped.float(),
        "clip_fraction_low": (is_clipped & (ratio < 1)).float(),
        "clip_fraction_high": (is_clipped & (ratio > 1)).float(),
        "behaviour_weight": bounded_exp(log_weight),
        "capped_fraction": (~is_within).float(),
        "behaviour_kl": bounded_exp(log_weight) - 1.0 - log_weight,
        "ratio": ratio,
        "update_kl": bounded_exp(log_update) - 1.0 - log_update,
    }


def _unless_stopped(
    config: AlgorithmConfig,
    loss: Tensor,
    stats: dict[str, Tensor],
    weight: Tensor,
    over_ranks: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and metrics; of a micro-batch that stops early, a loss of 0 without gradient."""
    means = torch.stack([stats["ratio"], stats["update_kl"]])
    if over_ranks is not None:
        means = mean_over_ranks(means, weight, over_ranks)
    is_stopped = is_too_far(means[0], means[1], config.early_stop_ratio, config.early_stop_kl)
    stopped = {"stopped_fraction": is_stopped.to(loss.dtype)}
    return torch.where(is_stopped, 0.0, loss), stats | stopped


def _weights(
    config: AlgorithmConfig, batch: SequenceBatch, log_weight: Tensor, tokens: PolicyTokens
) -> tuple[Tensor, Tensor]:
    """[T] of the behaviour policy, and whether each was left as it was."""
    mask, sequences = tokens.loss_mask, tokens.sequences
    weights, is_within = _behaviour_weights(config, batch, log_weight, sequences)
    if config.opsm_threshold is not None:
        gone = log_ratios(batch["behaviour_logprobs"], tokens.logprobs.detach(), mask)
        rule = (tokens.advantages, mask, sequences, config.opsm_threshold)
        is_gone = is_off_policy(gone, *rule)
        return torch.where(is_gone, 0.0, weights), is_within & ~is_gone
    return weights, is_within


def _behaviour_weights(
    config: AlgorithmConfig, batch: SequenceBatch, log_weight: Tensor, sequences: Segments
) -> tuple[Tensor, Tensor]:
    """The same, of proximal / behaviour alone."""
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
    if config.behaviour_weight_normalize:
        weights = weights * batch["weight_factor"]
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
    mask, metrics = batch["loss_mask"], {}
    penalties = torch.zeros_like(logprobs)
    if entropy is not None:
        metrics["entropy"] = torch.where(mask, entropy, 0.0)
    elif config.entropy_coef > 0:
        raise ValueError("entropy_coef is above 0 and no entropy was handed in")
    if config.entropy_coef > 0:
        penalties = penalties - config.entropy_coef * metrics["entropy"]
    if config.kl_coef > 0 and config.kl_in == "loss":
        reference = torch.where(mask, batch["reference_logprobs"], 0.0)
        metrics["reference_kl"] = kl_estimate(
            logprobs,
            reference,
            config.kl_estimator,
            config.kl_bound,
            straight_through=config.kl_straight_through,
        )
        if config.kl_bias_correction:
            ratio = bounded_exp(log_ratios(logprobs, batch["behaviour_logprobs"], mask))
            metrics["reference_kl"] = ratio * metrics["reference_kl"]
        penalties = penalties + config.kl_coef * metrics["reference_kl"]
    return penalties, metrics
