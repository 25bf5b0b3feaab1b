"""Do all regimes learn what the synchronous run learns, from as many trajectories?

    python benchmarks/learning.py --steps 100 --plot docs/images/learning.png

The quick start's task, model and data, warm-started once. Every regime then trains on the same number of
trajectories: GRPO without staleness is the synchronous run, the others run ahead by up to their eta.
`value` is the largest difference of a regime's last reward (the mean of ten steps) from the synchronous
one's. With `--runs`, runs that are there whole are taken as
they are.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import report

from headway.runtime.journal import METRICS_NAME, read_steps

WINDOW = 10


@dataclass(frozen=True)
class Regime:
    """A run as flags on the quick start's configuration."""

    name: str
    eta: int
    flags: tuple[str, ...] = ()


REGIMES = (
    Regime("GRPO, synchronous", 0),
    Regime("GRPO", 2),
    Regime(
        "RLOO",
        2,
        ("--trainer.algorithm.advantage={leave_one_out: true, std_level: none}",),
    ),
    Regime(
        "PPO with critic",
        2,
        (
            "--trainer.type=ppo",
            "--trainer.algorithm.advantage.type=gae",
            "--trainer.algorithm.advantage_norm=batch",
            "--trainer.critic.optimizer.lr=1e-3",
            "--trainer.critic.optimizer.schedule=linear",
            "--trainer.critic.optimizer.warmup_steps=5",
        ),
    ),
    Regime("decoupled PPO", 4),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, help="folder of the runs; those that ended are kept")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        runs = (options.runs or Path(folder)).resolve()
        steps = {
            regime: train(runs, regime, options.steps, options.seed)
            for regime in sorted(REGIMES, key=lambda regime: -regime.eta)  # most rows first
        }
    steps = {regime: steps[regime] for regime in REGIMES}
    rewards = {regime: last_reward(found) for regime, found in steps.items()}
    wanted = rewards[REGIMES[0]]
    if options.plot is not None:
        plot(steps, options.plot)
    report(
        "learning",
        "largest difference of the last mean reward from the synchronous run's",
        [max(abs(reward - wanted) for reward in rewards.values())],
        steps=options.steps,
        seed=options.seed,
        trajectories={r.name: int(sum(s["trajectories"] for s in steps[r])) for r in REGIMES},
        rewards={regime.name: round(reward, 4) for regime, reward in rewards.items()},
        staleness={r.name: max(int(s["staleness_max"]) for s in steps[r]) for r in REGIMES},
    )


def train(runs: Path, regime: Regime, steps: int, seed: int) -> list[dict[str, Any]]:
    """Return the metrics of each step; a complete run is not repeated."""
    first, run_dir = runs / "first", runs / regime.name.replace(",", "").replace(" ", "-")
    journal = run_dir / METRICS_NAME
    if len(read_steps(journal)) < steps:
        if not (first / "base").is_dir():
            warm_start(first, max(one.eta for one in REGIMES), steps, seed)
        headway(
            "run",
            f"--config={first / 'configs' / 'run.yaml'}",
            f"--trainer.run-dir={run_dir}",
            f"--trainer.weight-sync.root={run_dir / 'weights'}",
            f"--trainer.rollout.max-staleness={regime.eta}",
            f"--trainer.trainer.total-steps={steps}",
            f"--gateway.ledger={run_dir / 'ledger.sqlite'}",
            *regime.flags,
        )
    return read_steps(journal)


def warm_start(folder: Path, eta: int, steps: int, seed: int) -> None:
    """Data and a model that all regimes begin with, by a quick start of one step.

    It makes as many rows as its steps and its eta may ask for.
    """
    rows_for = ("--steps=1", f"--eta={eta + steps}")
    headway("quickstart", *rows_for, f"--seed={seed}", f"--run-dir={folder}")


def headway(*argv: str) -> None:
    command = [sys.executable, "-m", "headway.launch.cli", *argv]
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=sys.stderr)


def last_reward(steps: Sequence[dict[str, Any]]) -> float:
    return sum(float(step["reward"]) for step in steps[-WINDOW:]) / WINDOW


def plot(steps: dict[Regime, list[dict[str, Any]]], path: Path) -> None:
    """Reward (mean of ten steps) over trajectories."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for regime, found in steps.items():
        trajectories, rewards, done = [], [], 0
        for number, step in enumerate(found, 1):
            done += int(step["trajectories"])
            if number >= WINDOW:
                trajectories.append(done)
                rewards.append(last_reward(found[:number]))
        axis.plot(trajectories, rewards, label=f"{regime.name} (eta {regime.eta})")
    axis.set(xlabel="trajectories trained on", ylabel="mean reward of ten steps", ylim=(0, 1.02))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
