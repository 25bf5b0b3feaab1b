"""Does the trainer of a mixture of experts compute the logprobs that the server sampled with?

    python benchmarks/router_replay.py --steps 30 --seeds 3

The quick start's task and data, on a small Qwen3-MoE (4 of 16 experts for each token), warm-started once
per seed. Servers compute in bfloat16 and the trainer in float32, as engines and trainers differ on GPUs.
Each seed is trained with `algorithm.routed_experts` replay and ignore, without staleness and with two
versions of it. `value` is the mean |log(proximal / behaviour)| of ignore divided by that of replay, at
staleness 0, where the weights are the same and any distance is the fault of the computation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from measure import report

from headway.launch.quickstart import recipe, task
from headway.runtime.journal import METRICS_NAME, read_steps

WINDOW = 5
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 72,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""As many parameters for a token as the quick start's dense model has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--dtype", default="bfloat16", help="of the servers")
    parser.add_argument("--runs", type=Path, help="folder of the runs; those that ended are kept")
    options = parser.parse_args()
    modes = ("replay", "ignore")
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        runs = (options.runs or Path(folder)).resolve()
        found = {
            (mode, eta): [
                train(runs / f"seed-{seed}", mode, eta, seed, options)
                for seed in range(options.seeds)
            ]
            for eta in options.staleness
            for mode in modes
        }
    first = options.staleness[0]
    pairs = zip(found["ignore", first], found["replay", first], strict=True)
    report(
        "router_replay",
        "mean |log(proximal / behaviour)| of ignore / that of replay",
        [mean_of(ignore, "mean") / mean_of(replay, "mean") for ignore, replay in pairs],
        dtype=options.dtype,
        steps=options.steps,
        **{
            name: {
                f"{mode} {eta}": [of(run) for run in runs] for (mode, eta), runs in found.items()
            }
            for name, of in {
                "mean": lambda run: mean_of(run, "mean"),
                "largest": lambda run: max(float(step["logprob_diff_max"]) for step in run),
                "reward": mean_reward,
                "last_reward": lambda run: mean_reward(run[-WINDOW:]),
            }.items()
        },
    )


def train(
    folder: Path, mode: str, eta: int, seed: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the metrics of each step; a complete run is not repeated."""
    base, run_dir = folder / "base", folder / f"{mode}-{eta}"
    journal = run_dir / METRICS_NAME
    if not base.is_dir():
        warm_start(folder, seed, options.steps + max(options.staleness))
    if len(read_steps(journal)) < options.steps:
        config = recipe.reinforce(folder, options.steps, seed, eta, 1, resume=False)
        file = folder / f"{mode}-{eta}.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        module(
            "headway.launch.cli",
            "run",
            f"--config={file}",
            f"--trainer.run-dir={run_dir}",
            f"--trainer.weight-sync.root={run_dir / 'weights'}",
            f"--trainer.algorithm.routed-experts={mode}",
            f"--server.model.dtype={options.dtype}",
            f"--gateway.ledger={run_dir / 'ledger.sqlite'}",
        )
    return read_steps(journal)


def warm_start(folder: Path, seed: int, num_steps: int) -> None:
    """Write data and a model that knows the task a little."""
    data = folder / "data"
    task.write_model(folder / "scratch")
    file = folder / "scratch" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | EXPERTS))
    task.write_rows(data / "sft.jsonl", task.make_rows(recipe.SFT_ROWS, seed, task.NOISE))
    count = (num_steps + 2) * recipe.PROMPTS_PER_STEP
    task.write_rows(data / "rl.jsonl", task.make_rows(count, seed + recipe.SEED_OF_RL_ROWS))
    config = recipe.warm_start(folder, seed)
    file = folder / "warm_start.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    module("trainer", f"--config={file}")
    Path(config.output_dir).rename(folder / "base")


def module(*argv: str) -> None:
    subprocess.run(
        [sys.executable, "-m", *argv], check=True, stdout=subprocess.PIPE, stderr=sys.stderr
    )


def mean_of(steps: Sequence[dict[str, Any]], which: str) -> float:
    return statistics.fmean(float(step[f"logprob_diff_{which}"]) for step in steps)


def mean_reward(steps: Sequence[dict[str, Any]]) -> float:
    return round(statistics.fmean(float(step["reward"]) for step in steps), 4)


if __name__ == "__main__":
    main()
