"""`headway ray`: its help and arguments, which are those of a run."""

from __future__ import annotations

from headway.launch.run_command import RunSettingsCommand

ABOUT = """Start gateway, generation servers and trainer on a Ray cluster, and follow them to the end.

The cluster is the one that RAY_ADDRESS names, else one of this machine. The run folder has to be on a
file system that all its machines share. What servers and trainer need stands in scheduling.server and
trainer.trainer.scheduling; up to max_servers, the number of servers follows the work."""

command = RunSettingsCommand(
    "ray",
    "headway.launch.ray_run",
    ABOUT,
    "headway ray --config run.yaml --model MODEL_DIR --trainer.data.path train.jsonl\n"
    "RAY_ADDRESS=auto headway ray --config run.yaml --max-servers 8",
)
