"""The policy losses of this distribution, as their settings choose."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.contracts.config.policy_losses import (
    CISPOLossConfig,
    ClipCovLossConfig,
    ClipLossConfig,
    DPPOLossConfig,
    GMPOLossConfig,
    KLCovLossConfig,
    ReinforceLossConfig,
    SAPOLossConfig,
    UnclippedLossConfig,
)
from trainer.algorithms.covariance import covariances, draw_between, mark_largest
from trainer.algorithms.objectives import (
    cispo_objective,
    clipped_objective,
    dppo_objective,
    gmpo_objective,
    sapo_objective,
)
from trainer.algorithms.policy_loss_registry import (
    BatchTokens,
    PolicyLoss,
    PolicyTokens,
    TokenLosses,
)


def _clip(args: ClipLossConfig, tokens: PolicyTokens) -> TokenLosses:
    bounds = (args.eps_clip, args.eps_clip_higher, args.dual_clip)
    objective, is_clipped = clipped_objective(tokens.ratio, tokens.advantages, *bounds)
    return -objective, is_clipped


def _unclipped(args: UnclippedLossConfig, tokens: PolicyTokens) -> TokenLosses:
    return -tokens.ratio * tokens.advantages, _nothing(tokens)


def _reinforce(args: ReinforceLossConfig, tokens: PolicyTokens) -> TokenLosses:
    return -tokens.logprobs * tokens.advantages, _nothing(tokens)


def _cispo(args: CISPOLossConfig, tokens: PolicyTokens) -> TokenLosses:
    columns = (tokens.ratio, tokens.logprobs, tokens.advantages)
    objective, is_clipped = cispo_objective(*columns, args.eps_clip, args.eps_clip_higher)
    return -objective, is_clipped


def _sapo(args: SAPOLossConfig, tokens: PolicyTokens) -> TokenLosses:
    temperatures = (args.temperature_positive, args.temperature_negative)
    return -sapo_objective(tokens.ratio, tokens.advantages, *temperatures), _nothing(tokens)


def _gmpo(args: GMPOLossConfig, tokens: PolicyTokens) -> TokenLosses:
    columns = (tokens.log_ratios, tokens.advantages, tokens.loss_mask, tokens.sequences)
    objective, is_clipped = gmpo_objective(*columns, args.eps_clip, args.eps_clip_higher)
    return -objective, is_clipped


def _dppo(args: DPPOLossConfig, tokens: PolicyTokens) -> TokenLosses:
    objective, is_masked = dppo_objective(
        tokens.ratio,
        tokens.logprobs,
        tokens.proximal_logprobs,
        tokens.advantages,
        args.divergence,
        args.max_divergence_lower,
        args.max_divergence_higher,
    )
    return args.square_coef * tokens.log_ratios.square() - objective, is_masked


def _clip_cov(args: ClipCovLossConfig, tokens: PolicyTokens) -> TokenLosses:
    bounds = (args.eps_clip, args.eps_clip_higher)
    objective, is_clipped = clipped_objective(tokens.ratio, tokens.advantages, *bounds)
    is_drawn = _marked(tokens)
    return torch.where(is_drawn, -objective.detach(), -objective), is_clipped | is_drawn


def _kl_cov(args: KLCovLossConfig, tokens: PolicyTokens) -> TokenLosses:
    penalty = args.penalty_coef * tokens.log_ratios.abs()
    losses = torch.where(_marked(tokens), penalty, 0.0) - tokens.ratio * tokens.advantages
    return losses, _nothing(tokens)


def _draw_covariant(args: ClipCovLossConfig, tokens: BatchTokens) -> Tensor:
    values = covariances(tokens.logprobs, tokens.advantages, tokens.loss_mask)
    count = max(int(args.share * int(tokens.loss_mask.sum())), 1)
    bounds = (args.covariance_lower, args.covariance_upper)
    return draw_between(values, tokens.loss_mask, *bounds, count, seed=tokens.version)


def _mark_covariant(args: KLCovLossConfig, tokens: BatchTokens) -> Tensor:
    values = covariances(tokens.logprobs, tokens.advantages, tokens.loss_mask)
    count = max(int(args.share * int(tokens.loss_mask.sum())), 1)
    return mark_largest(values, tokens.loss_mask, count)


def _marked(tokens: PolicyTokens) -> Tensor:
    if tokens.prepared is None:
        raise ValueError("the batch has no column `prepared`; compute its advantages first")
    return tokens.prepared


def _nothing(tokens: PolicyTokens) -> Tensor:
    return torch.zeros_like(tokens.loss_mask)


CLIP = PolicyLoss(_clip, ClipLossConfig)
UNCLIPPED = PolicyLoss(_unclipped, UnclippedLossConfig)
REINFORCE = PolicyLoss(_reinforce, ReinforceLossConfig)
CISPO = PolicyLoss(_cispo, CISPOLossConfig)
SAPO = PolicyLoss(_sapo, SAPOLossConfig)
GMPO = PolicyLoss(_gmpo, GMPOLossConfig)
DPPO = PolicyLoss(_dppo, DPPOLossConfig)
CLIP_COV = PolicyLoss(_clip_cov, ClipCovLossConfig, _draw_covariant)
KL_COV = PolicyLoss(_kl_cov, KLCovLossConfig, _mark_covariant)
