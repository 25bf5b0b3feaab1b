"""An evaluation in metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from headway.contracts.errors import StaleVersion
from headway.contracts.types import PolicyVersion, TrajectoryGroup
from trainer.batching.sequences import first_branches


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Results of one prompt, an entry per sample."""

    scores: Sequence[float]
    response_tokens: Sequence[int]
    truncated: Sequence[bool]


def read_group(group: TrajectoryGroup, version: PolicyVersion) -> PromptResult:
    """Return the result of a prompt.

    Raises:
        StaleVersion: a token was sampled by another version.
    """
    rows = group.trajectories
    found = {int(v) for row in rows for v in np.unique(row.versions[row.loss_mask])}
    if found - {version}:
        raise StaleVersion(
            f"rollout {group.rollout_id!r} has tokens of the versions {sorted(found)}, the evaluation "
            f"is of version {version}; its scores were dropped"
        )
    samples = list(compress(rows, first_branches(rows)))
    return PromptResult(
        scores=[row.reward for row in samples],
        response_tokens=[int(row.loss_mask.sum()) for row in samples],
        truncated=[row.stop_reason == "length" for row in samples],
    )


def describe(prompts: Sequence[PromptResult], pass_score: float) -> dict[str, float]:
    """All prompts in metrics; each prompt has the same number of samples.

    Returns:
        `score` (mean of the samples), `pass@k` (mean of the prompts, if they have several samples),
        `response_tokens` (mean), `truncated` (share), `num_prompts` and `num_samples`.
    """
    scores = [score for prompt in prompts for score in prompt.scores]
    passed = [sum(score >= pass_score for score in prompt.scores) for prompt in prompts]
    num_samples = len(prompts[0].scores)
    return {
        "score": float(np.mean(scores)),
        **{
            f"pass@{k}": float(np.mean([pass_at_k(num_samples, count, k) for count in passed]))
            for k in _ks(num_samples)
        },
        "response_tokens": float(np.mean([n for one in prompts for n in one.response_tokens])),
        "truncated": float(np.mean([is_cut for one in prompts for is_cut in one.truncated])),
        "num_prompts": len(prompts),
        "num_samples": len(scores),
    }


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate that one of k samples passes: 1 - C(n - c, k) / C(n, k).

    Args:
        num_samples: n, at least k.
        num_passed: c, those of them that passed.
    Source: Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    if not 0 < k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples; k must be between 1 and their number")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def _ks(num_samples: int) -> Iterator[int]:
    if num_samples == 1:
        return
    k = 1
    while k < num_samples:
        yield k
        k *= 2
    yield num_samples
