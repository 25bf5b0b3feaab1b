"""The quick start: warm start, then asynchronous GRPO in three processes, on a laptop."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from headway.contracts.config.data import DataConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.errors import ConfigError, ServiceError
from headway.launch.failure import RunLogs
from headway.launch.launchers.local import run_module
from headway.launch.progress import Progress
from headway.launch.quickstart import recipe, task
from headway.launch.run import run_to_end

RUNS_DIR = Path("runs")
PREFIX = "quickstart-"
WARM_START_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the quick start."""

    steps: int
    eta: int
    sync: bool
    servers: int
    seed: int
    run_dir: Path | None
    resume: str | None
    """The folder of the run to go on with, or empty for the newest; None begins a new one."""
    lengths: str


def start(options: Options) -> None:
    """Run it; the last line on standard output is the summary as one JSON object."""
    started = time.monotonic()
    run_dir = _run_dir(options)
    max_staleness = 0 if options.sync else options.eta
    config = recipe.reinforce(
        run_dir,
        options.steps,
        options.seed,
        max_staleness,
        options.servers,
        options.resume is not None,
    )
    if options.lengths == "lognormal":
        config = _with_drawn_lengths(config)
    with Progress(options.steps) as progress:
        progress.say(f"run folder: {run_dir}")
        _warm_start(run_dir, options, progress)
        summary = run_to_end(config, progress, started, f"--resume {run_dir}")
    sys.stderr.write(
        f"reward {summary.reward_first10:.3f} -> {summary.reward_last10:.3f} in {summary.steps} steps, "
        f"{summary.trajectories} trajectories, staleness <= {summary.max_staleness} (eta {summary.eta}), "
        f"{summary.seconds:.0f} s; curves in {run_dir / 'curves.png'}\n"
    )
    sys.stdout.write(json.dumps(summary.to_dict()) + "\n")


def _run_dir(options: Options) -> Path:
    if options.resume is None:
        name = f"{PREFIX}{datetime.now().astimezone():%Y%m%d-%H%M%S}"
        folder: Path = options.run_dir or RUNS_DIR / name
        if (folder / "ledger.sqlite").exists():
            raise ConfigError(
                f"{folder} holds a run; choose another folder, or go on with --resume {folder}"
            )
        return folder.resolve()
    if options.resume:
        folder = Path(options.resume)
    else:
        runs = sorted(RUNS_DIR.glob(f"{PREFIX}*"))
        if not runs:
            raise ConfigError(
                f"no run to resume below {RUNS_DIR.resolve()}; name its folder after --resume"
            )
        folder = runs[-1]
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no run folder; --resume wants one that a quick start made")
    return folder.resolve()


def _warm_start(run_dir: Path, options: Options, progress: Progress) -> None:
    """Make data and the warm-started model, unless the run folder has them."""
    base = run_dir / "base"
    if base.is_dir():
        return
    data = run_dir / "data"
    task.write_model(run_dir / "scratch")
    task.write_rows(data / "sft.jsonl", task.make_rows(recipe.SFT_ROWS, options.seed, task.NOISE))
    count = (options.steps + options.eta + 2) * recipe.PROMPTS_PER_STEP
    rows = task.make_rows(count, options.seed + recipe.SEED_OF_RL_ROWS)
    drawn = task.with_lognormal_lengths(rows, options.seed)
    task.write_rows(data / "rl.jsonl", drawn if options.lengths == "lognormal" else rows)
    config = recipe.warm_start(run_dir, options.seed)
    logs = RunLogs(run_dir)
    process = run_module("warm_start", "trainer", config, run_dir, threads=2)
    progress.say("warm start: supervised training on noisy demonstrations")
    try:
        code = process.wait(WARM_START_TIMEOUT_S)
        if code is None:
            raise ServiceError(f"the warm start did not end within {WARM_START_TIMEOUT_S:g} s")
        if code:
            raise logs.failure("warm_start", code)
    finally:
        process.stop(grace_s=5.0)
    Path(config.output_dir).rename(base)


def _with_drawn_lengths(config: LaunchConfig) -> LaunchConfig:
    """Every response as long as its row says, whatever the model would do."""
    trainer = config.trainer
    data = DataConfig(**{**trainer.data.model_dump(), "max_new_tokens_key": "max_new_tokens"})
    sampling = trainer.sampling.model_copy(update={"ignore_eos": True})
    trainer = trainer.model_copy(update={"data": data, "sampling": sampling})
    return config.model_copy(update={"trainer": trainer})
