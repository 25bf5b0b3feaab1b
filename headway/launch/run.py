"""`headway run --config run.yaml`: gateway, servers and trainer of your own, with one command."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headway.contracts.config.launch import LaunchConfig
from headway.launch.experiments import load_run
from headway.launch.failure import explain_failure
from headway.launch.follow import Summary, follow, summarise
from headway.launch.launchers.local import LocalRun
from headway.launch.launchers.run import Run
from headway.launch.launchers.version_store import place_versions
from headway.launch.progress import Progress
from headway.runtime.fork_server import ForkServer

RESUME = "--trainer.recovery.mode resume"


def main(argv: Sequence[str], fork_server: ForkServer | None = None) -> None:
    """Run to the trainer's end; the last line on standard output is the summary as JSON.

    Args:
        fork_server: as of `LocalRun`.
    """
    config = load_run(argv)
    started = time.monotonic()
    with Progress(config.trainer.trainer.planned_steps) as progress:
        progress.say(f"run folder: {Path(config.trainer.run_dir).resolve()}")
        summary = run_to_end(config, progress, started, RESUME, fork_server)
    sys.stdout.write(json.dumps(summary.to_dict()) + "\n")


def run_to_end(
    config: LaunchConfig,
    progress: Progress,
    started: float,
    resume: str,
    fork_server: ForkServer | None = None,
) -> Summary:
    """Start all processes of a run, show it until its trainer ends, and sum it up.

    Args:
        started: when the command began, by the monotonic clock.
        resume: flags that go on with a run that has a checkpoint.
        fork_server: as of `LocalRun`.
    Raises:
        CommandFailed: a process failed; with its name, its reason and its log.
    """
    config, changed = place_versions(config)
    if changed is not None:
        progress.say(changed)
    return follow_to_end(LocalRun(config, fork_server), config, progress, started, resume)


def follow_to_end(
    run: Run, config: LaunchConfig, progress: Progress, started: float, resume: str
) -> Summary:
    """As `run_to_end`, of a run on whichever machines."""
    trainer, run_dir = config.trainer, Path(config.trainer.run_dir).resolve()
    with run, explain_failure(run, config, resume):
        run.start()
        progress.say(
            f"gateway {run.url}, {config.num_servers} generation server(s), trainer: started"
        )
        follow(run, run_dir, trainer.trainer.planned_steps, progress)
        return summarise(run, run_dir, trainer.rollout.max_staleness, started)
