"""`headway run --config run.yaml`: gateway, servers and trainer of your own, with one command."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headway.contracts.config.launch import LaunchConfig
from headway.launch.failure import explained
from headway.launch.follow import follow, summarise
from headway.launch.launchers.local import LocalRun
from headway.launch.launchers.version_store import place_versions
from headway.launch.progress import Progress
from headway.runtime.config import load_config

RESUME = "--trainer.recovery.resume true"


def main(argv: Sequence[str]) -> None:
    """Run to the trainer's end; the last line on standard output is the summary as JSON."""
    config, changed = place_versions(load_config(LaunchConfig, argv))
    started = time.monotonic()
    run_dir = Path(config.trainer.run_dir).resolve()
    total_steps = config.trainer.trainer.total_steps
    with (
        Progress(total_steps) as progress,
        LocalRun(config) as run,
        explained(run, config, RESUME),
    ):
        progress.say(f"run folder: {run_dir}")
        if changed is not None:
            progress.say(changed)
        run.start()
        progress.say(
            f"gateway {run.url}, {config.num_servers} generation server(s), trainer: started"
        )
        follow(run, run_dir, total_steps, progress)
        summary = summarise(run, run_dir, config.trainer.rollout.max_staleness, started)
    sys.stdout.write(json.dumps(summary.to_dict()) + "\n")
