"""A run on Slurm: a job is cancelled, one is added, and the trainer's is requeued, while it trains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.contracts.config.launch import LaunchConfig
from headway.launch.cli import main as headway
from headway.runtime.config import dump_yaml
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.driving import END_S, START_S, steps_of, until_checkpoint, until_steps
from tests.integration.slurm_cluster import Slurm, slurm
from tests.waiting import eventually

pytestmark = [
    pytest.mark.extended,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which("slurmctld") is None or shutil.which("munged") is None,
        reason="Slurm is not installed: apt-get install slurm-wlm munge",
    ),
]
STEPS = 12
REQUEUE_S = 120.0
"""Slurm starts a requeued job so much later."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    with slurm(tmp_path / "slurm") as cluster:
        yield cluster


def test_jobs_come_and_go_and_the_run_ends_well(
    cluster: Slurm,
    make_config: Callable[..., LaunchConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(steps=STEPS, num_servers=2, resume=True)
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(config))
    token = [
        "--gateway.service.allow-anonymous",
        "true",
        "--server.service.allow-anonymous",
        "true",
    ]
    headway(["slurm", "--config", str(file), *token])
    cluster.bash(capsys.readouterr().out)
    folder = Path(config.trainer.run_dir)
    ready = folder / "configs" / "gateway.ready.json"
    eventually(ready.exists, START_S, "the gateway is ready")
    client = RemoteInferenceEngine(json.loads(ready.read_text())["url"], connect_timeout_s=START_S)
    until_steps(config, 2)

    (first, *_) = cluster.jobs("server")
    cluster.bash(f"scancel {first}")
    cluster.bash(f"sbatch --array=7 {folder / 'slurm' / 'server.sh'}")
    until_checkpoint(config)
    (trainer,) = cluster.jobs("run")
    cluster.bash(f"scontrol requeue {trainer}")
    eventually(
        lambda: len(steps_of(config)) >= STEPS,
        REQUEUE_S + END_S,
        "the requeued job has done the rest",
    )
    audit = client.audit()
    assert (audit.lost, audit.duplicated) == (0, 0)
    client.destroy()
    assert [step["step"] for step in steps_of(config)] == list(range(STEPS))
    eventually(lambda: not cluster.jobs(""), END_S, "all jobs have ended")
    log = (folder / "logs" / f"trainer-{trainer}.log").read_text()
    assert "servers have weights of before" in log  # the second trainer went on with them
