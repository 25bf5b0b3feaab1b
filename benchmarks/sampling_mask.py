"""How far are the trainer's logprobs from the server's where sampling cuts the distribution?

    python benchmarks/sampling_mask.py --steps 30 --seeds 3

The quick start's task, model and data, warm-started once per seed, trained without staleness: the weights
that sampled a token are those that the step starts from, so any mean |log(proximal / behaviour)| is the
fault of how logprobs are computed. Each seed is trained with `algorithm.sampling_mask` replay and ignore,
both with `--top-p`, and once without a cut. `value` is the mean |log-ratio| with replay, over all steps.
With ignore it is as small, but of a distribution that nothing was drawn from: what that costs is in the
rewards, means of all steps and of the last five.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import report

from headway.runtime.journal import METRICS_NAME, read_steps

WINDOW = 5


@dataclass(frozen=True)
class Variant:
    """A run as flags on the quick start's configuration."""

    name: str
    flags: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--runs", type=Path, help="folder of the runs; those that ended are kept")
    options = parser.parse_args()
    cut = f"--trainer.sampling.top-p={options.top_p}"
    variants = [
        Variant(mode, (cut, f"--trainer.algorithm.sampling-mask={mode}"))
        for mode in ("replay", "ignore")
    ] + [Variant("whole", ())]
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        runs = (options.runs or Path(folder)).resolve()
        steps = {
            variant.name: [
                train(runs / f"seed-{seed}", variant, options.steps, seed)
                for seed in range(options.seeds)
            ]
            for variant in variants
        }
    report(
        "sampling_mask",
        "mean |log(proximal / behaviour)| with replay, 1e-9 nats per token",
        [1e9 * mean_distance(run) for run in steps["replay"]],
        top_p=options.top_p,
        steps=options.steps,
        log_ratio={name: [mean_distance(run) for run in found] for name, found in steps.items()},
        reward={name: [mean_reward(run) for run in found] for name, found in steps.items()},
        last_reward={
            name: [mean_reward(run[-WINDOW:]) for run in found] for name, found in steps.items()
        },
        staleness=max(int(step["staleness_max"]) for run in steps["replay"] for step in run),
    )


def train(folder: Path, variant: Variant, steps: int, seed: int) -> list[dict[str, Any]]:
    """Return the metrics of each step; a complete run is not repeated."""
    first, run_dir = folder / "first", folder / variant.name
    journal = run_dir / METRICS_NAME
    if len(read_steps(journal)) < steps:
        if not (first / "base").is_dir():  # its eta makes rows for as many steps
            flags = ("--steps=1", f"--eta={steps}", f"--seed={seed}", f"--run-dir={first}")
            headway("quickstart", *flags)
        headway(
            "run",
            f"--config={first / 'configs' / 'run.yaml'}",
            f"--trainer.run-dir={run_dir}",
            f"--trainer.weight-sync.root={run_dir / 'weights'}",
            "--trainer.rollout.max-staleness=0",
            f"--trainer.trainer.total-steps={steps}",
            f"--gateway.ledger={run_dir / 'ledger.sqlite'}",
            *variant.flags,
        )
    return read_steps(journal)


def headway(*argv: str) -> None:
    command = [sys.executable, "-m", "headway.launch.cli", *argv]
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=sys.stderr)


def mean_distance(steps: Sequence[dict[str, Any]]) -> float:
    return statistics.fmean(float(step["logprob_diff_mean"]) for step in steps)


def mean_reward(steps: Sequence[dict[str, Any]]) -> float:
    return round(statistics.fmean(float(step["reward"]) for step in steps), 4)


if __name__ == "__main__":
    main()
