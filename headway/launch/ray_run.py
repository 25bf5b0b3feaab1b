"""`headway ray --config run.yaml`: a run on a Ray cluster, followed to its end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headway.contracts.errors import ConfigError
from headway.launch.experiments import load_run
from headway.launch.progress import Progress
from headway.launch.run import RESUME, follow_to_end


def main(argv: Sequence[str]) -> None:
    """Run to the trainer's end; the last line on standard output is the summary as JSON."""
    config, started = load_run(argv), time.monotonic()
    try:
        from headway.launch.launchers.ray_cluster import RayRun
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error}; pip install "headway-rl[ray]"') from None
    with Progress(config.trainer.trainer.planned_steps) as progress:
        progress.say(f"run folder: {Path(config.trainer.run_dir).resolve()}")
        summary = follow_to_end(RayRun(config), config, progress, started, RESUME)
    sys.stdout.write(json.dumps(summary.to_dict()) + "\n")
