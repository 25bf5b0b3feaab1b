"""Losses of pairs: sequences 2i (chosen) and 2i + 1 (rejected) of a packed batch.

A micro-batch must hold whole pairs; its weight is their number. Each returns the mean over pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headway.contracts.config.preference import PreferenceConfig
from trainer.algorithms.segments import Segments


def pair_margins(values: Tensor) -> Tensor:
    """[P] chosen minus rejected of [2P] values of sequences.

    Raises:
        ValueError: an odd number of sequences.
    """
    if len(values) % 2:
        raise ValueError(f"{len(values)} sequences are not pairs; pack chosen and rejected in turn")
    return values[0::2] - values[1::2]


def pair_metrics(rewards: Tensor) -> dict[str, Tensor]:
    """Return metrics of [2P] rewards of sequences, as means over pairs.

    Returns:
        `accuracy` (share of pairs whose chosen answer has the higher reward), `margin`, `chosen_reward`
        and `rejected_reward`; without gradients.
    """
    rewards = rewards.detach()
    margins = pair_margins(rewards)
    return {
        "accuracy": (margins > 0).double().mean(),
        "margin": margins.mean(),
        "chosen_reward": rewards[0::2].mean(),
        "rejected_reward": rewards[1::2].mean(),
    }


def sequence_gains(
    logprobs: Tensor, reference_logprobs: Tensor, loss_mask: Tensor, sequences: Segments
) -> Tensor:
    """[2P] how much likelier than under the reference each answer is: sums over its tokens.

    Times beta it is the reward that the policy stands for (DPO, arXiv:2305.18290, section 5.1).

    Args:
        logprobs, reference_logprobs: [T]; differentiable in the first.
        loss_mask: [T] bool, true on the answers.
    """
    return sequences.sums(logprobs, loss_mask) - sequences.sums(reference_logprobs, loss_mask)


def dpo_loss(margins: Tensor, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """`-log sigmoid(beta · margin)`.

    Args:
        margins: [P], `pair_margins` of `sequence_gains`.
        label_smoothing: share of labels held to be wrong (conservative DPO).
    Source:
        DPO (arXiv:2305.18290) eq. 7; the smoothing: E. Mitchell, "A note on DPO with noisy
        preferences" (2023). Both as TRL's `loss_type="sigmoid"` has them.
    """
    agree = logsigmoid(beta * margins)
    differ = logsigmoid(-beta * margins)
    return -((1 - label_smoothing) * agree + label_smoothing * differ).mean()


def ipo_loss(margins: Tensor, beta: float = 0.1) -> Tensor:
    """`(margin - 1 / (2 · beta))²`: a margin to reach, not one to grow without end.

    Args:
        margins: [P], `pair_margins` of `sequence_gains`.
    Source:
        IPO (arXiv:2310.12036) eq. 17, with sums over the answers as there. TRL's `loss_type="ipo"`
        takes means over their tokens instead, which asks more of long answers.
    """
    return (margins - 1.0 / (2.0 * beta)).square().mean()


def hinge_loss(margins: Tensor, beta: float = 0.1) -> Tensor:
    """`max(0, 1 - beta · margin)`: a pair whose margin is large enough has no gradient.

    Args:
        margins: [P], `pair_margins` of `sequence_gains`.
    Source:
        SLiC-HF (arXiv:2305.10425) on DPO's margin, as RSO (arXiv:2309.06657) has it, and TRL's
        `loss_type="hinge"`.
    """
    return (1.0 - beta * margins).clamp(min=0.0).mean()


def exo_pair_loss(margins: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """KL(policy's preference || smoothed label): the pair's probabilities are sigmoid(±beta · margin).

    DPO is the same with the KL the other way round.

    Args:
        margins: [P], `pair_margins` of `sequence_gains`.
        label_smoothing: above 0, share of labels held to be wrong; at 0 the KL is infinite.
    Source:
        EXO (arXiv:2402.00856); TRL's `loss_type="exo_pair"`.
    """
    agree, differ = logsigmoid(beta * margins), logsigmoid(-beta * margins)
    right, wrong = math.log1p(-label_smoothing), math.log(label_smoothing)
    return (agree.exp() * (agree - right) + differ.exp() * (differ - wrong)).mean()


def preference_loss(config: PreferenceConfig, margins: Tensor) -> Tensor:
    """Return the mean over pairs of the loss that a configuration chooses.

    Args:
        margins: [P], `pair_margins` of `sequence_gains`.
    """
    beta, smoothing = config.beta, config.label_smoothing
    if config.loss == "dpo":
        return dpo_loss(margins, beta, smoothing)
    if config.loss == "exo_pair":
        return exo_pair_loss(margins, beta, smoothing)
    return (ipo_loss if config.loss == "ipo" else hinge_loss)(margins, beta)


def sequence_scores(values: Tensor, sequences: Segments) -> Tensor:
    """Return [N] the value at the last row of each sequence: a scalar head's score of the whole.

    Args:
        values: [T], differentiable.
    """
    every = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    return values[sequences.last(every)]


def bradley_terry_loss(margins: Tensor, wanted: Tensor | None = None) -> Tensor:
    """`-log sigmoid(score of chosen - score of rejected - wanted)`.

    Args:
        margins: [P], `pair_margins` of the scores.
        wanted: [P] margin that the label asks for (Llama 2, arXiv:2307.09288, eq. 2); None is 0.
    Source:
        Bradley and Terry (1952); as a reward model: InstructGPT (arXiv:2203.02155) eq. 1, and TRL's
        `RewardTrainer`.
    """
    return -logsigmoid(margins if wanted is None else margins - wanted).mean()
