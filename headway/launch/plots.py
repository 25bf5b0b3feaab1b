"""The curves of a run as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

CURVES_NAME = "curves.png"


def import_plotting() -> None:
    """Import what `plot_run` needs, which takes a second; early, so that the end of a run is not
    kept waiting by it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: F401


def plot_run(steps: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Over steps: reward, staleness, seconds, the distance between policies, what is left of the samples
    by it, and the entropy; the last two stay empty where no forward precedes the update."""
    import_plotting()
    from matplotlib import pyplot

    x = [step["step"] for step in steps]
    figure, axes = pyplot.subplots(3, 2, figsize=(10, 9), layout="constrained", sharex=True)
    reward, staleness, seconds, drift, samples, entropy = axes.flat
    reward.plot(x, [step["reward"] for step in steps], color="tab:green")
    reward.set(title="mean reward", ylim=(0, 1.02))
    staleness.step(x, [step["staleness_max"] for step in steps], where="mid", label="max")
    staleness.plot(x, [step["staleness_mean"] for step in steps], label="mean")
    staleness.set(title="staleness at consumption (versions)", ylim=(0, None))
    staleness.legend()
    parts = {"waiting": "wait_s", "training": "train_s", "publishing": "publish_s"}
    seconds.stackplot(x, [[step[key] for step in steps] for key in parts.values()], labels=parts)
    seconds.set(title="seconds per step", ylim=(0, None))
    seconds.legend()
    drift.plot(x, [step.get("behaviour_kl", nan) for step in steps], color="tab:red")
    drift.set(title="KL(behaviour || proximal), k3", ylim=(0, None))
    samples.plot(x, [step.get("effective_sample_size", nan) for step in steps], color="tab:purple")
    samples.set(title="effective sample size (share)", xlabel="step", ylim=(0, 1.02))
    entropy.plot(x, [step.get("entropy", nan) for step in steps], color="tab:brown")
    entropy.set(title="entropy (nats)", xlabel="step", ylim=(0, None))
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
