"""Corrections that keep tokens sampled by another policy from misleading the update.

`log_weight` = proximal - behaviour, 0 outside of the mask. Everything here has no gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.ratios import RatioLevel, at_level, bounded_exp
from trainer.algorithms.segments import Segments

BoundAction = Literal["mask", "clamp"]
RejectionMetric = Literal["ratio", "k1", "k2", "k3"]
RejectionLevel = Literal["token", "sequence"]
SequenceStatistic = Literal["mean", "sum", "max"]


@torch.no_grad()
def behaviour_weights(
    log_weight: Tensor,
    loss_mask: Tensor,
    sequences: Segments,
    level: RatioLevel = "token",
    floor: float | None = None,
    cap: float | None = None,
    action: BoundAction = "mask",
) -> tuple[Tensor, Tensor]:
    """proximal / behaviour, bounded.

    Args:
        log_weight: [T].
        level: of the token, or of its sequence (geometric mean, or product).
        floor, cap: None has no bound; a weight at a bound is kept.
        action: `mask` sets weights outside to 0: a cap alone is AReaL's (arXiv:2505.24298), floor
            and cap are IcePop's band (Ring-1T, arXiv:2510.18855). `clamp` moves it to the bound:
            truncated importance sampling (Yao et al., 2025; Espeholt et al., arXiv:1802.01561).
    Returns:
        weights [T], and bool [T] that is true within the bounds. Tokens of weight 0 stay in the
        denominator of the loss.
    """
    weights = bounded_exp(at_level(log_weight, loss_mask, sequences, level))
    is_within = torch.ones_like(loss_mask)
    if cap is not None:
        is_within &= weights <= cap
    if floor is not None:
        is_within &= weights >= floor
    if action == "clamp" and not (floor is None and cap is None):
        return weights.clamp(floor, cap), is_within
    return torch.where(is_within, weights, 0.0), is_within


@torch.no_grad()
def accepted(
    log_weight: Tensor,
    loss_mask: Tensor,
    sequences: Segments,
    metric: RejectionMetric = "ratio",
    level: RejectionLevel = "token",
    statistic: SequenceStatistic = "mean",
    lower: float | None = None,
    upper: float | None = None,
) -> Tensor:
    """Mark the tokens that are near enough to the behaviour policy to learn from.

    Args:
        log_weight: [T].
        metric: `ratio` = proximal / behaviour; k1 = -log(ratio), k2 = log(ratio)²/2,
            k3 = ratio - 1 - log(ratio): estimates of KL(behaviour || proximal).
        level: test each token, or the whole sequence by one number.
        statistic: of the sequence's actions; for `ratio` in log space, so that `mean` is the geometric
            mean and `sum` the ratio of whole responses.
        lower, upper: values outside are rejected; None has no bound.
    Returns:
        [T] bool, true = accepted.
    Source:
        Geometric and sequence-level masking: J. Liu et al., "When Speed Kills Stability" (2025).
    """
    distance = _distance(log_weight, metric)
    if level == "sequence":
        reduce = {"mean": sequences.means, "sum": sequences.sums, "max": sequences.maxima}
        distance = reduce[statistic](distance, loss_mask)[sequences.index]
    if metric == "ratio":
        distance = bounded_exp(distance)
    kept = torch.ones_like(loss_mask)
    if lower is not None:
        kept &= distance >= lower
    if upper is not None:
        kept &= distance <= upper
    return kept


def _distance(log_weight: Tensor, metric: RejectionMetric) -> Tensor:
    if metric == "ratio":
        return log_weight
    if metric == "k1":
        return -log_weight
    if metric == "k2":
        return log_weight.square() / 2
    return bounded_exp(log_weight) - 1.0 - log_weight


@torch.no_grad()
def normalizing_factor(
    weights: Tensor, loss_mask: Tensor, sequences: Segments, level: RatioLevel = "token"
) -> float:
    """Return the factor that gives a batch's weights a mean of 1.

    Args:
        weights: [T] of `behaviour_weights`, of a whole batch.
        level: a mean over tokens, or over sequences of their one weight.
    Returns:
        1 where all weights are 0.
    Source:
        verl's `rollout_is_batch_normalize`; self-normalised importance sampling.
    """
    if level == "token":
        mean = float(torch.where(loss_mask, weights, 0.0).sum(dtype=torch.float64))
        mean /= max(int(loss_mask.sum()), 1)
    else:
        means = sequences.means(weights, loss_mask)
        mean = float(means.sum()) / max(int((sequences.sizes(loss_mask) > 0).sum()), 1)
    return 1.0 / mean if mean > 0 else 1.0


@torch.no_grad()
def is_off_policy(
    log_ratio: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequences: Segments,
    threshold: float,
) -> Tensor:
    """Mark tokens with a negative advantage in sequences that the policy would hardly sample any more.

    Args:
        log_ratio: [T] log(behaviour / policy), 0 outside of the mask.
        threshold: on the mean over a sequence, in nats; above it the sequence is marked.
    Returns:
        [T] bool.
    Source:
        Off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556) 3.1.
    """
    distance = sequences.means(log_ratio, loss_mask)[sequences.index]
    return (distance > threshold) & (advantages < 0)


@torch.no_grad()
def within_second_moment(log_weight: Tensor, loss_mask: Tensor, threshold: float) -> Tensor:
    """Drop the fewest of the largest `log_weight²` so that the mean of the rest is below a threshold.

    Depends on all tokens that it sees, so it is called on a whole batch, not on a micro-batch (as AReaL
    does, whose result hangs on how the batch was cut).

    Args:
        log_weight: [T].
        threshold: of the second moment; at least one token is kept, however far it is.
    Returns:
        [T] bool, true = kept; true outside of the mask.
    Source:
        M2PO (arXiv:2510.01161) algorithm 1.
    """
    positions = loss_mask.nonzero().flatten()
    squares = log_weight[positions].double().square()
    ascending, order = squares.sort()
    means = ascending.cumsum(0) / torch.arange(1, len(order) + 1, device=squares.device)
    # The mean of the k smallest grows with k, so that those below the threshold come first.
    num_kept = max(int((means < threshold).sum()), 1)
    kept = torch.ones_like(loss_mask)
    kept[positions[order[num_kept:]]] = False
    return kept


def proximal_shares(behaviour_versions: Tensor, version: int) -> Tensor:
    """Return the position of the proximal policy between behaviour (0) and current policy (1), per
    token.

    The proximal policy is `version`, on the way to `version + 1`, so a token of version b is
    (version - b) / (version + 1 - b) of the way along: 0 for a fresh token, towards 1 for an old one.

    Args:
        behaviour_versions: [T]; below 0 where no version is known, which counts as fresh.
        version: that the step trains from.
    Returns:
        [T] float32 in [0, 1).
    Source:
        AReaL's loglinear approximation.
    """
    age = (version - behaviour_versions).clamp(min=0)
    return torch.where(behaviour_versions >= 0, age / (age + 1), 0.0)


@torch.no_grad()
def interpolated_proximal(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    shares: Tensor,
    line: Literal["loglinear", "linear"] = "loglinear",
) -> Tensor:
    """[T] proximal logprobs without a forward of their own: on the line from behaviour to current.

    Args:
        logprobs: [T] under the weights that are being trained.
        shares: [T] of `proximal_shares`.
        line: of logprobs, or of probabilities (AReaL's `linear`).
    """
    if line == "linear":
        far = logprobs + shares.log()
        mixed = torch.logaddexp(behaviour_logprobs + torch.log1p(-shares), far)
        return torch.where(shares > 0, mixed, behaviour_logprobs)
    # Where the share is 0 the current logprob, finite or not, must not count.
    step = torch.where(shares > 0, shares * (logprobs - behaviour_logprobs), 0.0)
    return behaviour_logprobs + step
