"""The jobs of a whole run on Slurm: a gateway, an array of generation servers, and the trainer.

The array grows by `sbatch --array=8-11 server.sh`, and shrinks by `scancel`. Servers and trainer find the
gateway by its ready file. When the trainer has ended, the other jobs do, too.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.scheduling import JobConfig
from headway.contracts.config.weight_sync import CollectiveSync
from headway.contracts.errors import ConfigError
from headway.launch.launchers.placement import gpus_of_server
from headway.launch.launchers.roles import gateway_config, server_config, trainer_config
from headway.launch.launchers.spread import allow_any_host, spread
from headway.launch.slurm import (
    FIRST_MACHINE,
    Job,
    batch_script,
    job_name,
    python,
    quoted,
    step,
    trainer_job,
    trainer_words,
    write_config,
)
from headway.runtime.command import EXIT_USAGE

HERE = "$SLURMD_NODENAME"
"""Name of the machine, by which the others reach it."""


def write_scripts(config: LaunchConfig) -> str:
    """Write the scripts of a run and what its processes read; returns the commands that submit them.

    Raises:
        ConfigError: the run cannot be spread over machines, or the number of its servers is to change.
    """
    config = spread(config)
    if config.max_servers is not None:
        raise ConfigError(
            "max_servers is for runs on Ray; Slurm's servers are added by `sbatch --array`, see the page "
            "on deployment"
        )
    run_dir = Path(config.trainer.run_dir).resolve()
    write_config(run_dir, "run", config)
    ready = run_dir / "configs" / "gateway.ready.json"
    scripts = {
        "gateway": _gateway(config, run_dir, ready),
        "server": _server(config, run_dir, ready),
        "trainer": _trainer(config, run_dir, ready),
    }
    folder = run_dir / "slurm"
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        (folder / f"{name}.sh").write_text(script)
    after = "--dependency=after:$gateway"
    return (
        f"rm -f {shlex.quote(str(ready))}\n"
        f"gateway=$(sbatch --parsable {shlex.quote(str(folder / 'gateway.sh'))})\n"
        f"sbatch {after} {shlex.quote(str(folder / 'server.sh'))}\n"
        f"sbatch {after} {shlex.quote(str(folder / 'trainer.sh'))}\n"
    )


def _gateway(config: LaunchConfig, run_dir: Path, ready: Path) -> str:
    file = write_config(run_dir, "gateway", gateway_config(config, ready))
    job = _job("gateway", config.scheduling.gateway, run_dir, cores=1, gpus=0)
    words = [*step(job), python(job), "-m", "headway.launch.cli", "gateway"]
    words += ["--config", str(file), "--service.host", HERE]
    return batch_script(job, [f"rm -f {shlex.quote(str(ready))}", " ".join(map(quoted, words))])


def _server(config: LaunchConfig, run_dir: Path, ready: Path) -> str:
    server = allow_any_host(config, server_config(config, None, None))
    file = write_config(run_dir, "server", server)
    backend = config.server.backend
    job = _job(
        "server",
        config.scheduling.server,
        run_dir,
        cores=getattr(backend, "num_threads", None) or 1,
        gpus=gpus_of_server(config.server),
        array=f"0-{config.num_servers - 1}",
    )
    words = [*step(job), python(job), "-m", "inference_server", "--config", str(file)]
    words += ["--service.host", HERE, "--gateway", "$url"]
    return batch_script(job, [_url(job, ready), " ".join(map(quoted, words))])


def _trainer(config: LaunchConfig, run_dir: Path, ready: Path) -> str:
    trainer = trainer_config(config, None)
    file = write_config(run_dir, "trainer", trainer)
    job = trainer_job(trainer, run_dir)
    words = [*trainer_words(job, trainer, file), "--rollout.url", "$url"]
    if isinstance(trainer.weight_sync, CollectiveSync):
        words += ["--weight-sync.host", "$first"]
    command = " ".join(map(quoted, words))
    name = job_name(run_dir)
    return batch_script(
        job,
        [
            *FIRST_MACHINE,
            _url(job, ready),
            'resume="${SLURM_RESTART_COUNT:+--recovery.mode auto}"',
            f"retries={trainer.recovery.max_retries}",
            "status=0",
            f"until {command} $resume; do",
            "    status=$?",
            f"    if [ $status = {EXIT_USAGE} ] || [ $retries = 0 ]; then break; fi",
            "    retries=$((retries - 1)) status=0",
            '    resume="--recovery.mode auto"',
            f"    sleep {trainer.recovery.retry_after_s:g}",
            "done",
            f'scancel --user="$(id -un)" --name={name}-server',
            f'scancel --user="$(id -un)" --name={name}-gateway',
            "exit $status",
        ],
    )


def _job(
    role: str, wanted: JobConfig, run_dir: Path, cores: int, gpus: int, **further: object
) -> Job:
    return Job(
        f"{job_name(run_dir)}-{role}",
        wanted,
        cores=wanted.cpu or cores,
        gpus=gpus if wanted.gpu is None else wanted.gpu,
        mem=wanted.mem,
        log=run_dir / "logs" / (f"{role}-%a-%A.log" if "array" in further else f"{role}-%j.log"),
        further={"requeue": None, **further},
    )


def _url(job: Job, ready: Path) -> str:
    """The line that waits for the gateway and sets `url`."""
    read = "import json, sys; print(json.load(open(sys.argv[1]))['url'])"
    words = [python(job), "-c", read, str(ready)]
    return f"until url=$({' '.join(map(quoted, words))} 2> /dev/null); do sleep 1; done"
