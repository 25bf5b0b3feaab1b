"""A tiny model and rows of the quick start's task, whose right answers are preferred to wrong ones.

    python examples/preferences/make_data.py --output runs/preferences

Six digits are continued by a lagged sum. A demonstration has a wrong digit here and there; a pair is
the right answer and such a demonstration.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from headway.launch.quickstart import task

TRAIN_ROWS, HELD_OUT_ROWS = 8000, 200
SEED_OF_HELD_OUT = 1_000_000
"""Added to the seed, so that other prompts are drawn."""


def make_pairs(seed: int) -> Iterator[dict[str, str]]:
    """Rows with `prompt`, `completion` (to imitate), `chosen` and `rejected`, without end."""
    while True:
        for row in task.make_rows(1000, seed, task.NOISE):
            chosen = task.respond([int(digit) for digit in row["prompt"]])
            if chosen != row["completion"]:
                yield {**row, "chosen": chosen, "rejected": row["completion"]}
        seed += 1


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
        task.write_rows(options.output / f"{name}.jsonl", islice(make_pairs(seed), count))


if __name__ == "__main__":
    main()
