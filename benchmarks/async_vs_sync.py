"""Compare the speed of asynchronous and synchronous training, for the same trajectories consumed.

    python benchmarks/async_vs_sync.py --pairs 3 --steps 30

Both are `headway quickstart` with the same model, data and settings, in alternation on this machine;
the synchronous one has eta 0. Response lengths are drawn lognormal (median 24 tokens, sigma 0.8, at
most 192), as the lengths of real rollouts are; what is timed is the trainer's loop, from the first
prompt submitted to the last version committed. The value is seconds(sync) / seconds(async), the
median over the pairs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import report

from headway.runtime.journal import METRICS_NAME, read_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--eta", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        ratios, seconds = [], []
        for pair in range(options.pairs):
            times = {}
            # Which one goes first alternates too.
            for mode in ("async", "sync") if pair % 2 == 0 else ("sync", "async"):
                times[mode] = run(Path(folder), mode, pair, options)
            ratios.append(times["sync"] / times["async"])
            seconds.append(times)
    report(
        "async_vs_sync",
        "seconds(sync) / seconds(async)",
        ratios,
        steps=options.steps,
        eta=options.eta,
        seconds=seconds,
    )


def run(folder: Path, mode: str, pair: int, options: argparse.Namespace) -> float:
    """Seconds of the trainer's loop; base model and data are made once and shared."""
    run_dir = folder / f"{mode}-{pair}"
    shared = folder / "shared"
    for name in ("base", "data"):
        if shared.is_dir():
            shutil.copytree(shared / name, run_dir / name)
    command = [sys.executable, "-m", "headway.launch.cli", "quickstart", "--lengths", "lognormal"]
    command += ["--steps", str(options.steps), "--eta", str(options.eta), "--run-dir", str(run_dir)]
    command += ["--sync"] if mode == "sync" else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    if not shared.is_dir():
        for name in ("base", "data"):
            shutil.copytree(run_dir / name, shared / name)
    summary = json.loads(done.stdout.splitlines()[-1])
    if summary["lost"] or summary["duplicated"]:
        raise SystemExit(f"the run lost or duplicated trajectories: {summary}")
    steps = read_steps(run_dir / METRICS_NAME)
    total = sum(step["wait_s"] + step["train_s"] + step["publish_s"] for step in steps)
    tokens = sum(step["response_tokens"] * step["trajectories"] for step in steps)
    print(f"{mode} {pair}: {total:.1f} s, {tokens:.0f} response tokens", file=sys.stderr)
    return total


if __name__ == "__main__":
    main()
