"""`headway slurm`: its help and arguments, which are a trainer's."""

from __future__ import annotations

from headway.runtime.experiment_command import ExperimentCommand

ABOUT = """Write batch scripts for Slurm.

Of an experiment, with the settings of `headway train`: the script of the trainer's ranks, to standard
output. What each rank needs stands in trainer.scheduling.

Of a run, with the settings of `headway run`: a gateway, an array of servers and the trainer, into
RUN_DIR/slurm, and to standard output the commands that submit them. What gateway and servers need stands
in scheduling.

The run folder has to be on a file system that all machines share."""

command = ExperimentCommand(
    "slurm",
    "headway.launch.slurm",
    ABOUT,
    "headway slurm --config run.yaml | bash\n"
    "headway slurm --config experiment.yaml > job.sh && sbatch job.sh",
)
