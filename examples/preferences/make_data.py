"""A tiny model, and rows of the quick start's task: answers that name their result are preferred.

    python examples/preferences/make_data.py --output runs/preferences

Six digits are continued by a lagged sum, and `1380;38` ends with the result where `1380` does not.
Demonstrations are of either kind.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from headway.launch.quickstart import task

TRAIN_ROWS, HELD_OUT_ROWS = 8000, 200
SEED_OF_HELD_OUT = 1_000_000
"""Added to the seed, so that other prompts are drawn."""


def make_pairs(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Rows with `prompt`, `completion` (to imitate), `chosen` and `rejected`."""
    rng = random.Random(seed)
    for row in task.make_rows(count, seed):
        chosen = row["completion"]
        rejected = chosen.partition(";")[0]
        completion = rng.choice((chosen, rejected))
        yield {**row, "completion": completion, "chosen": chosen, "rejected": rejected}


def main() -> None:
    """Read the options and write model and rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows")
    options = parser.parse_args()
    task.write_model(options.output / "scratch")
    for name, count, seed in (
        ("train", TRAIN_ROWS, options.seed),
        ("held_out", HELD_OUT_ROWS, options.seed + SEED_OF_HELD_OUT),
    ):
        task.write_rows(options.output / f"{name}.jsonl", make_pairs(count, seed))


if __name__ == "__main__":
    main()
