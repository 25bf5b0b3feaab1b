"""`headway slurm --config FILE`: batch scripts of a trainer, or of a whole run.

    headway slurm --config experiment.yaml > job.sh && sbatch job.sh
    headway slurm --config run.yaml | bash

Slurm starts one torchrun per machine, and that one its ranks. The run folder has to be on a file system
that all machines share: configurations, logs and weights are there. A job that Slurm starts again goes on
from its newest checkpoint.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from headway.contracts.config.experiment import ExperimentConfig
from headway.contracts.config.scheduling import JobConfig
from headway.contracts.errors import ConfigError
from headway.launch.config_check import MODELS
from headway.launch.experiments import launch_model
from headway.runtime.config import dump_yaml, merge_sources, validate_config

PORT = 29500
"""Port of torchrun's rendezvous, on the first machine; torchrun's own default."""


def main(argv: Sequence[str]) -> None:
    """Write configurations into the run folder. To standard output goes the trainer's script, or what
    submits those of a run.
    """
    tree = merge_sources(argv)
    if not {"gateway", "server"}.isdisjoint(tree):
        from headway.launch.slurm_run import write_scripts

        sys.stdout.write(write_scripts(validate_config(launch_model(tree), tree)))
        return
    kind = str(tree.get("type", "grpo"))
    model = MODELS.get(kind)
    if model is None or not issubclass(model, ExperimentConfig):
        known = ", ".join(name for name, one in MODELS.items() if issubclass(one, ExperimentConfig))
        raise ConfigError(f"type={kind} is no experiment that is known here; known: {known}")
    config = validate_config(model, tree)
    run_dir = Path(config.run_dir).resolve()
    file = write_config(run_dir, "trainer", config)
    job = trainer_job(config, run_dir)
    words = [*map(quoted, trainer_words(job, config, file)), *_resume(config)]
    sys.stdout.write(batch_script(job, [*FIRST_MACHINE, " ".join(words)]))


FIRST_MACHINE = (
    'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
    "first=${nodes%%$'\\n'*}",
)
"""Sets `first` for the words of `trainer_words`."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a batch script asks Slurm for."""

    name: str
    wanted: JobConfig
    cores: int
    """CPU cores of each machine, as `gpus` and `mem`."""
    gpus: int
    mem: int
    """In MiB."""
    log: Path
    nodes: int = 1
    further: Mapping[str, object] = field(default_factory=dict)
    """More options of sbatch."""


def write_config(run_dir: Path, name: str, config: BaseModel) -> Path:
    """Write what a process reads into the run folder."""
    file = run_dir / "configs" / f"{name}.yaml"
    for folder in (file.parent, run_dir / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_yaml(config))
    return file


def batch_script(job: Job, steps: Sequence[str]) -> str:
    """Return a script for `sbatch` that runs these lines."""
    header = [
        f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={value}"
        for name, value in _options(job)
    ]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.wanted.env_vars.items()]
    return "\n".join(["#!/bin/bash", *header, "", "set -euo pipefail", *exports, *steps, ""])


def _options(job: Job) -> Iterator[tuple[str, object]]:
    yield "job-name", job.name
    yield "nodes", job.nodes
    yield "ntasks-per-node", 1
    yield "cpus-per-task", job.cores
    if job.gpus:
        yield "gres", f"gpu:{job.gpus}"
    yield "mem", f"{job.mem}M"
    for name in ("partition", "nodelist", "exclude", "begin", "deadline"):
        if getattr(job.wanted, name) is not None:
            yield name, getattr(job.wanted, name)
    if job.wanted.time_limit is not None:
        yield "time", job.wanted.time_limit
    yield "output", shlex.quote(str(job.log))
    yield "open-mode", "append"
    yield from job.further.items()


def job_name(run_dir: Path) -> str:
    """Return the name of a run's jobs; `scancel` finds them by it, so no other run has it."""
    checksum = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]
    return f"headway-{checksum}-{run_dir.name}".replace(" ", "_")


def step(job: Job) -> list[str]:
    """Return how a script starts a process on each of its machines."""
    # srun has not taken the cores from sbatch since Slurm 22.05.
    words = ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={job.cores}"]
    if job.wanted.container_image is not None:
        words.append(f"--container-image={job.wanted.container_image}")
    return words


def python(job: Job) -> str:
    """Return the interpreter of a job's processes: an image brings its own."""
    return "python3" if job.wanted.container_image else sys.executable


def trainer_job(config: ExperimentConfig, run_dir: Path) -> Job:
    """Return what the trainer's ranks ask for.

    Raises:
        ConfigError: they are to train on GPUs and ask for none.
    """
    wanted = config.trainer.scheduling
    ranks, device = wanted.ranks_per_node, config.trainer.device
    if wanted.gpu == 0 and device == "cuda":
        raise ConfigError(
            "trainer.device=cuda, and trainer.scheduling.gpu=0 asks for none; set one of them otherwise"
        )
    return Job(
        job_name(run_dir),
        wanted,
        cores=(wanted.cpu or config.trainer.num_threads or 1) * ranks,
        gpus=(int(device == "cuda") if wanted.gpu is None else wanted.gpu) * ranks,
        mem=wanted.mem * ranks,
        log=run_dir / "logs" / "trainer-%j.log",
        nodes=wanted.nodes,
    )


def trainer_words(job: Job, config: ExperimentConfig, file: Path) -> list[str]:
    """Return the command of the ranks, which reads `$first`."""
    return [
        *step(job),
        *(python(job), "-m", "torch.distributed.run"),
        *("--nnodes", str(job.nodes)),
        *("--nproc-per-node", str(config.trainer.scheduling.ranks_per_node)),
        *("--rdzv-backend", "c10d", "--rdzv-id", "$SLURM_JOB_ID"),
        *("--rdzv-endpoint", f"$first:{PORT}"),
        *("-m", "trainer", "--config", str(file)),
    ]


def _resume(config: ExperimentConfig) -> list[str]:
    """Slurm counts how often it started the job again; only what has checkpoints can go on."""
    if "recovery" not in type(config).model_fields:
        return []
    return ["${SLURM_RESTART_COUNT:+--recovery.mode auto}"]


def quoted(word: str) -> str:
    """Return a word as bash reads it; one that begins with `$` is a variable's value."""
    return f'"{word}"' if word.startswith("$") else shlex.quote(word)
