"""`headway slurm`: its help and arguments, which are a trainer's."""

from __future__ import annotations

from headway.runtime.experiment_command import ExperimentCommand

ABOUT = """Write a batch script for the trainer's ranks on Slurm to standard output.

The settings are those of `headway train`; the ranks and what each of them needs stand in
trainer.scheduling. The run folder has to be on a file system that all machines share."""

command = ExperimentCommand(
    "slurm",
    "headway.launch.slurm",
    ABOUT,
    "headway slurm --config experiment.yaml > job.sh && sbatch job.sh",
)
