"""Are the losses of a DPO run on one rank those on several, and what share of the peak does it reach?

    python benchmarks/gpu_dpo.py --size 1.5b --ranks 8

A random model (the policy; the reference is a second copy) learns from random pairs in bfloat16 passes,
once on one rank and once on `--ranks`; every step's loss must agree to `--tolerance`, relatively.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from day.models import write_model
from measure import report

from headway.launch.quickstart import task

METRICS = ("train_s", "train_tokens_per_s", "mfu", "peak_memory_bytes")


def main() -> int:
    """Run both, and compare."""
    options = parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model", options.size)
        task.write_rows(folder / "rows.jsonl", pairs(options.pairs * options.steps, options.length))
        runs = {ranks: run(folder, ranks, options) for ranks in sorted({1, options.ranks})}
    for ranks, steps in runs.items():
        for name in METRICS:
            values = [step[name] for step in steps[1:] if step.get(name) is not None]
            if values:
                report(f"dpo_{name}", name, values, ranks=ranks, size=options.size)
    errors = [
        abs(one["loss"] - many["loss"]) / max(abs(one["loss"]), 1e-6)
        for one, many in zip(runs[1], runs[options.ranks], strict=True)
    ]
    report("dpo_loss_error", "relative, largest", [max(errors)], ranks=options.ranks)
    return int(max(errors) > options.tolerance)


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=16, help="of a step")
    parser.add_argument("--length", type=int, default=60, help="longest answer, in tokens")
    parser.add_argument("--tolerance", type=float, default=1e-2)
    return parser.parse_args()


def pairs(count: int, length: int) -> Iterator[dict[str, Any]]:
    """Random digits."""
    rng = random.Random(0)

    def digits(longest: int) -> str:
        return "".join(rng.choices("0123456789", k=rng.randint(longest // 2, longest)))

    for _ in range(count):
        yield {"prompt": digits(6), "chosen": digits(length), "rejected": digits(length)}


def run(folder: Path, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Lines of the metrics of a run."""
    run_dir = folder / f"ranks-{ranks}"
    config = {
        "type": "dpo",
        "run_dir": str(run_dir),
        "output_dir": str(run_dir / "model"),
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl"), "batch_size": options.pairs},
        "optimizer": {"lr": 1e-5},
        "trainer": {
            "total_steps": options.steps,
            "max_tokens_per_mb": 8192,
            "compute_dtype": "bfloat16",
        },
        "recovery": {"every_steps": options.steps + 1},
    }
    file = folder / f"ranks-{ranks}.yaml"
    file.write_text(yaml.safe_dump(config))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    start = [sys.executable, *(torchrun if ranks > 1 else ())]
    subprocess.run([*start, "-m", "trainer", "--config", str(file)], check=True)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(run_dir)  # checkpoint and model, some 24 GB of a large one
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    sys.exit(main())
