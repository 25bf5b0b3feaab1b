"""Measure the time from the command to a given reward, beside TRL's `GRPOTrainer`.

    python benchmarks/against_trl.py --size small
    python benchmarks/against_trl.py --size large --trainer-threads 2 --server-threads 1

`headway run` and a script with TRL's `GRPOTrainer` (generation by transformers, its default;
`against_trl_rival.py`) take turns as fresh processes on the same cores, with the same model, prompts,
sampling, loss and optimizer; which goes first alternates. `headway run` goes twice, synchronous as TRL is
(eta 0), and with `--eta`. Each way's `command_s` is the whole command, start-up included, `first_step_s`
until the first step had ended, `step_s` the mean of the others, and `reward` the mean of the last five
steps. `value` is seconds(TRL) / seconds(headway) of the whole command, pair by pair.

Both sides get the same optimizer and learning rate; `--set` adds flags to `headway run`, to measure the
effect of one of them. `--cores` are the first ones of those that this process may use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from against_trl_task import Setting, write_model, write_prompts
from measure import report

from headway.runtime.journal import METRICS_NAME, read_steps

HERE = Path(__file__).resolve().parent
SIZES = {
    "small": {"hidden": 64, "layers": 2, "max_new_tokens": 16, "steps": 60},
    "large": {"hidden": 256, "layers": 4, "max_new_tokens": 128, "steps": 20},
}
WINDOW = 5
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Turn:
    """One command, from its start to its end."""

    command_s: float
    first_step_s: float
    step_s: float
    reward: float
    """Mean of the last five steps."""


def main() -> None:
    options = parse()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    sizes = SIZES[options.size] | ({"steps": options.steps} if options.steps else {})
    setting = Setting(
        **sizes,
        prompts=options.prompts,
        group_size=options.group_size,
        lr=options.lr,
        beta2=options.beta2,
        schedule=options.schedule,
        max_grad_norm=1.0,
        eps_clip=0.2,
        seed=options.seed,
    )
    ways: dict[str, int | None] = {"trl": None, "headway": 0}
    if options.eta:
        ways[f"headway eta {options.eta}"] = options.eta
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="headway-") as place:
        parameters = write_model(Path(place) / "model", setting)
        write_prompts(Path(place) / "prompts.jsonl", setting.seed)
        for pair in range(options.pairs):
            for name in rotated(list(ways), pair):
                folder = Path(place) / f"{name.replace(' ', '-')}-{pair}"
                folder.mkdir()
                turn = take_turn(folder, setting, ways[name], options)
                print(f"{name} {pair}: {turn}", file=sys.stderr)
                turns[name].append(turn)
    for name in list(ways)[1:]:
        report(
            "against_trl",
            "seconds(TRL) / seconds(headway)",
            [t.command_s / o.command_s for t, o in zip(turns["trl"], turns[name], strict=True)],
            eta=ways[name],
            size=options.size,
            parameters=parameters,
            headway=medians(turns[name]),
            trl=medians(turns["trl"]),
            cores=options.cores,
            threads={
                "trl": options.trl_threads,
                "trainer": options.trainer_threads,
                "server": options.server_threads,
            },
            set=options.set,
            **asdict(setting),
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument(
        "--steps", type=int, help="default: 60 of the small one, 20 of the large one"
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--eta", type=int, default=1, help="of the third way; 0 leaves it out")
    parser.add_argument("--prompts", type=int, default=4, help="per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--schedule", choices=("constant", "linear", "cosine"), default="constant")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--trl-threads", type=int, default=2)
    parser.add_argument("--trainer-threads", type=int, default=2)
    parser.add_argument("--server-threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has trl")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FLAG", help="of headway run; may be repeated"
    )
    return parser.parse_args()


def rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def take_turn(folder: Path, setting: Setting, eta: int | None, options: argparse.Namespace) -> Turn:
    """Run one command to its end; without an eta it is TRL's."""
    with tempfile.TemporaryDirectory(prefix="headway-", dir=shared_memory()) as weights:
        if eta is None:
            command = rival_command(folder, setting, options.trl_python)
        else:
            tree = our_config(folder, Path(weights), setting, eta, options)
            command = our_command(folder / "run.yaml", tree, options.set)
        started, clock = time.time(), time.monotonic()
        done = subprocess.run(
            command,
            env=environment(options.trl_threads),
            capture_output=True,
            text=True,
            check=False,
        )
        command_s = time.monotonic() - clock
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr[-4000:]}")
    ends, rewards = rival_steps(folder) if eta is None else our_steps(folder)
    if len(ends) != setting.steps:
        raise SystemExit(f"{folder.name}: {len(ends)} steps were recorded, {setting.steps} wanted")
    between = (ends[-1] - ends[0]) / max(1, len(ends) - 1)
    return Turn(command_s, ends[0] - started, between, statistics.fmean(rewards[-WINDOW:]))


def environment(trl_threads: int) -> dict[str, str]:
    """Return the environment of either command; our trainer and server have settings of their own for
    their threads.
    """
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    ours = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **ours, "OMP_NUM_THREADS": str(trl_threads)}


def shared_memory() -> Path | None:
    """Return the best folder for versions of the weights; None is the system's temporary directory."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else None


def rival_command(folder: Path, setting: Setting, python: str) -> list[str]:
    shared = folder.parent
    paths = (str(shared / "model"), str(shared / "prompts.jsonl"), str(folder))
    return [python, str(HERE / "against_trl_rival.py"), setting.to_json(), *paths]


def rival_steps(folder: Path) -> tuple[list[float], list[float]]:
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [row["ended"] for row in rows], [row["reward"] for row in rows]


def our_command(file: Path, tree: Mapping[str, Any], flags: Sequence[str]) -> list[str]:
    file.write_text(yaml.safe_dump(tree))
    return [sys.executable, "-m", "headway.launch.cli", "run", "--config", str(file), *flags]


def our_config(
    folder: Path, weights: Path, setting: Setting, eta: int, options: argparse.Namespace
) -> dict[str, Any]:
    shared, concurrent = folder.parent, setting.prompts * setting.group_size * (eta + 1)
    return {
        "model": str(shared / "model"),
        "gateway": {
            "service": {"port": 0},
            "modules": ["against_trl_reward"],
            "ledger": str(folder / "ledger.sqlite"),
        },
        "server": {
            "service": {"port": 0},
            "backend": {
                "max_sequences": concurrent,
                "num_threads": options.server_threads,
                "seed": setting.seed,
            },
        },
        "trainer": {
            "run_dir": str(folder / "run"),
            "data": {
                "path": str(shared / "prompts.jsonl"),
                "batch_size": setting.prompts,
                "seed": setting.seed,
            },
            "sampling": {"max_new_tokens": setting.max_new_tokens},
            "rollout": {
                "reward": {"name": "digit_share"},
                "group_size": setting.group_size,
                "max_staleness": eta,
            },
            "algorithm": {"policy_loss": {"eps_clip": setting.eps_clip}},
            "optimizer": {
                "lr": setting.lr,
                "beta2": setting.beta2,
                "schedule": setting.schedule,
                "max_grad_norm": setting.max_grad_norm,
            },
            "weight_sync": {"type": "shared_memory", "root": str(weights)},
            "trainer": {
                "total_steps": setting.steps,
                "num_threads": options.trainer_threads,
                "seed": setting.seed,
            },
            "recovery": {"every_steps": setting.steps},
        },
    }


def our_steps(folder: Path) -> tuple[list[float], list[float]]:
    rows = read_steps(folder / "run" / METRICS_NAME)
    # `time` is when the batch had come.
    ends = [row["time"] + row["train_s"] + row["publish_s"] for row in rows]
    return ends, [row["reward"] for row in rows]


def medians(turns: Sequence[Turn]) -> dict[str, float]:
    names = Turn.__dataclass_fields__
    return {n: round(statistics.median(getattr(turn, n) for turn in turns), 4) for n in names}


if __name__ == "__main__":
    main()
