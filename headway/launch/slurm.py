"""`headway slurm --config experiment.yaml`: a batch script for the trainer's ranks, on standard output.

    headway slurm --config experiment.yaml > job.sh
    sbatch job.sh

Slurm starts one torchrun per machine, and that one its ranks. The run folder has to be on a file system
that all machines share: the trainer's configuration and its log are there. A job that Slurm starts again
goes on from its newest checkpoint.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from headway.contracts.config.experiment import ExperimentConfig
from headway.contracts.config.scheduling import SchedulingConfig
from headway.contracts.errors import ConfigError
from headway.launch.config_check import MODELS
from headway.runtime.config import dump_yaml, merge_sources, validate_config

PORT = 29500
"""Port of torchrun's rendezvous, on the first machine; torchrun's own default."""


def main(argv: Sequence[str]) -> None:
    """Write the trainer's configuration into the run folder, and the script to standard output."""
    tree = merge_sources(argv)
    kind = str(tree.get("type", "grpo"))
    model = MODELS.get(kind)
    if model is None or not issubclass(model, ExperimentConfig):
        known = ", ".join(name for name, one in MODELS.items() if issubclass(one, ExperimentConfig))
        raise ConfigError(f"type={kind} is no experiment that is known here; known: {known}")
    config = validate_config(model, tree)
    file = Path(config.run_dir).resolve() / "configs" / "trainer.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    (file.parent.parent / "logs").mkdir(exist_ok=True)
    file.write_text(dump_yaml(config))
    sys.stdout.write(batch_script(config, file))


def batch_script(config: ExperimentConfig, file: Path) -> str:
    """Return the script for `sbatch`.

    Args:
        file: the configuration that the ranks read.
    """
    wanted = config.trainer.scheduling
    header = [f"#SBATCH --{name}={value}" for name, value in _options(config, file)]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in wanted.env_vars.items()]
    return "\n".join(
        ["#!/bin/bash", *header, "", "set -euo pipefail", *exports, *_steps(config, file), ""]
    )


def _options(config: ExperimentConfig, file: Path) -> Iterator[tuple[str, object]]:
    wanted, ranks = config.trainer.scheduling, config.trainer.scheduling.ranks_per_node
    yield "job-name", f"headway-{file.parent.parent.name}".replace(" ", "_")
    yield "nodes", wanted.nodes
    yield "ntasks-per-node", 1
    yield "cpus-per-task", _cores(config)
    num_gpus = _gpus(config) * ranks
    if num_gpus:
        yield "gres", f"gpu:{num_gpus}"
    yield "mem", f"{wanted.mem * ranks}M"
    for name in ("partition", "nodelist", "exclude", "begin", "deadline"):
        if getattr(wanted, name) is not None:
            yield name, getattr(wanted, name)
    if wanted.time_limit is not None:
        yield "time", wanted.time_limit
    yield "output", shlex.quote(str(file.parent.parent / "logs" / "trainer-%j.log"))
    yield "open-mode", "append"


def _gpus(config: ExperimentConfig) -> int:
    """Return the GPUs of a rank.

    Raises:
        ConfigError: it is to train on one and asks for none.
    """
    wanted, device = config.trainer.scheduling.gpu, config.trainer.device
    if wanted == 0 and device == "cuda":
        raise ConfigError(
            "trainer.device=cuda, and trainer.scheduling.gpu=0 asks for none; set one of them otherwise"
        )
    return int(device == "cuda") if wanted is None else wanted


def _cores(config: ExperimentConfig) -> int:
    """Return the cores of all ranks on a machine."""
    wanted = config.trainer.scheduling
    return (wanted.cpu or config.trainer.num_threads or 1) * wanted.ranks_per_node


def _steps(config: ExperimentConfig, file: Path) -> list[str]:
    wanted = config.trainer.scheduling
    # srun has not taken the cores from sbatch since Slurm 22.05.
    step = ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={_cores(config)}"]
    python = "python3" if wanted.container_image else sys.executable
    torchrun = [
        *(python, "-m", "torch.distributed.run"),
        *("--nnodes", str(wanted.nodes), "--nproc-per-node", str(wanted.ranks_per_node)),
        *("--rdzv-backend", "c10d", "--rdzv-id", "$SLURM_JOB_ID"),
        *("--rdzv-endpoint", f"$first:{PORT}"),
    ]
    trainer = ["-m", "trainer", "--config", str(file)]
    return [
        'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "first=${nodes%%$'\\n'*}",
        " ".join([*map(_quoted, [*step, *_container(wanted)]), "\\"]),
        "    " + " ".join([*map(_quoted, torchrun), "\\"]),
        "    " + " ".join([*map(_quoted, trainer), *_resume(config)]),
    ]


def _container(wanted: SchedulingConfig) -> list[str]:
    return [] if wanted.container_image is None else [f"--container-image={wanted.container_image}"]


def _resume(config: ExperimentConfig) -> list[str]:
    """Slurm counts how often it started the job again; only what has checkpoints can go on."""
    if "recovery" not in type(config).model_fields:
        return []
    return ["${SLURM_RESTART_COUNT:+--recovery.mode auto}"]


def _quoted(word: str) -> str:
    return f'"{word}"' if word.startswith("$") else shlex.quote(word)
