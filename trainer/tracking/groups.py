"""The curves of a run, sorted: `loss` is shown as `policy/loss`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.tracking.base import Metrics

GROUPS = {
    "rollout": (
        "version reward truncated response_tokens tokens trajectories staleness_max staleness_mean "
        "mixed_versions staleness_trajectories staleness_tokens"
    ),
    "mismatch": (
        "logprob_diff_mean logprob_diff_max behaviour_kl effective_sample_size behaviour_weight "
        "capped_fraction"
    ),
    "policy": (
        "loss clip_fraction clip_fraction_low clip_fraction_high ratio update_kl stopped_fraction "
        "entropy reference_kl kl_coef teacher_kl"
    ),
    "critic": (
        "value_loss value_clip_fraction critic_grad_norm critic_lr critic_skipped_steps "
        "value_mean return_mean explained_variance"
    ),
    "preference": "accuracy chosen_reward rejected_reward margin sft_loss",
    "evaluation": "evaluation_* eval_*",
    "optimizer": "grad_norm lr skipped_steps",
    "float16": "loss_scale critic_loss_scale",
    "speed": (
        "wait_s train_s publish_s idle_share train_tokens_per_s train_tokens_per_s_per_rank mfu "
        "padding_share micro_batch_fill peak_memory_bytes weight_transfer_s weight_transfer_model_bytes "
        "weight_transfer_copied_bytes weight_transfer_copied_bytes_all_ranks"
    ),
    "run": "time sink_failures",
}
"""Group -> its metrics, `eval_*` for all that begin with `eval_`; one without a group belongs to
`other`."""

_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}


def curve_name(metric: str) -> str:
    """Return the metric's name with its group in front."""
    family = f"{metric.split('_')[0]}_*"
    group = _GROUP_OF.get(metric) or _GROUP_OF.get(family, "other")
    return f"{group}/{metric}"


def scalars(metrics: Metrics) -> Iterator[tuple[str, float]]:
    """Yield curves and their values; unknown ones are left out."""
    for name, value in metrics.items():
        if name != "step" and isinstance(value, int | float):
            yield curve_name(name), float(value)


def histograms(metrics: Metrics) -> Iterator[tuple[str, list[int]]]:
    """Curves and how often the values 0, 1, 2, … were seen; those of nothing are left out."""
    for name, value in metrics.items():
        if is_histogram(value):
            yield curve_name(name), value


def is_histogram(value: Any) -> bool:
    """True if the value is a list of counts with a sum above 0."""
    return isinstance(value, list) and sum(value) > 0
