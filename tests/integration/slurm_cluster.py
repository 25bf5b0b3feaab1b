"""A real Slurm of one machine: munged, slurmctld and slurmd, with files and ports of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.contract.page_runner import free_port
from tests.waiting import eventually

NODE = "localhost"
LIMIT_S = 60.0
CONFIG = """ClusterName=tests
SlurmctldHost={node}
SlurmUser=root
SlurmctldPort={ctld}
SlurmdPort={slurmd}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
KillWait=30
MailProg=/bin/true
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={node} NodeHostname={hostname} NodeAddr=127.0.0.1 CPUs=64 RealMemory=65536 State=UNKNOWN
PartitionName=all Nodes={node} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Commands of a cluster."""

    def __init__(self, config: Path) -> None:
        self._env = {**os.environ, "SLURM_CONF": str(config)}

    def bash(self, script: str) -> str:
        """What a script prints; it must not fail."""
        done = self._run("bash", "-euc", script)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def jobs(self, role: str) -> list[str]:
        """Ids of the jobs whose names end with a role; every one that is not over."""
        lines = self.bash("squeue --noheader --array --format='%i %j'").splitlines()
        return [line.split()[0] for line in lines if line.split()[1].endswith(role)]

    def is_up(self) -> bool:
        """True once its machine takes jobs."""
        return self._run("sinfo", "--noheader", "--format=%t").stdout.strip() == "idle"

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env=self._env, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start it; everything of it is ended at the end."""
    for name in ("", "state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            node=NODE,
            hostname=socket.gethostname().split(".")[0],
            folder=folder,
            ctld=free_port(),
            slurmd=free_port(),
        )
    )
    munged = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munged += [f"--socket={folder / 'munge.socket'}", f"--pid-file={folder / 'munge.pid'}"]
    munged += [f"--log-file={folder / 'munged.log'}", f"--seed-file={folder / 'munge.seed'}"]
    daemons = [munged, ["slurmctld", "-D", "-c", "-f", str(config)]]
    daemons.append(["slurmd", "-D", "-N", NODE, "-f", str(config)])
    with ExitStack() as stack:
        for argv in daemons:
            stack.enter_context(_running(argv, folder / f"{argv[0]}.out"))
        cluster = Slurm(config)
        eventually(cluster.is_up, LIMIT_S, "Slurm's machine is idle")
        yield cluster
        cluster.bash("scancel --user=$(id -un) --signal=KILL --full || true")


@contextmanager
def _running(argv: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [shutil.which(argv[0]) or argv[0], *argv[1:]], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
