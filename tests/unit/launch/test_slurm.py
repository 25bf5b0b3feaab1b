"""The batch script: its options as Slurm writes them, and what it runs, run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headway.contracts.config.experiment import SFTExperiment
from headway.contracts.errors import ConfigError
from headway.launch import slurm
from headway.runtime.config import load_config

SCHEDULING = {
    "nodes": 2,
    "ranks_per_node": 4,
    "cpu": 3,
    "gpu": 1,
    "mem": 1000,
    "partition": "long",
    "nodelist": "gpu[01-04]",
    "exclude": "gpu03",
    "time_limit": "1-12:00:00",
    "begin": "now+1hour",
    "deadline": "2030-01-20T12:34:00",
    "env_vars": {"NCCL_DEBUG": "it's $HOME"},
}
OPTIONS = {
    "job-name": "headway-my_run",
    "nodes": "2",
    "ntasks-per-node": "1",
    "cpus-per-task": "12",
    "gres": "gpu:4",
    "mem": "4000M",
    "partition": "long",
    "nodelist": "gpu[01-04]",
    "exclude": "gpu03",
    "time": "1-12:00:00",
    "begin": "now+1hour",
    "deadline": "2030-01-20T12:34:00",
    "open-mode": "append",
}


def write_config(folder: Path, scheduling: dict, kind: str = "sft") -> list[str]:
    tree = {
        "type": kind,
        "run_dir": str(folder / "my run"),
        "model": {"path": "model"},
        "data": {"path": "rows.jsonl"},
        "trainer": {"scheduling": scheduling},
    }
    if kind == "sft":
        tree["output_dir"] = "out"
    else:
        tree |= {
            "rollout": {
                "url": "http://gateway",
                "workflow": {"name": "single_turn"},
                "reward": {"name": "exact"},
            },
            "weight_sync": {"type": "disk", "root": str(folder / "weights")},
        }
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump(tree))
    return ["--config", str(file)]


def options_of(script: str) -> dict[str, str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH --")]
    return dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines)


def run_script(script: str, folder: Path, **environment: str) -> list[str]:
    """The words that srun is called with, one a line; then the added variable."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    commands = {
        "scontrol": "echo node-1; echo node-2",
        "srun": 'printf "%s\\n" "$@" "NCCL_DEBUG=${NCCL_DEBUG:-}"',
    }
    for name, body in commands.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    env = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[1-2]", **environment}
    done = subprocess.run(
        ["bash"], input=script, env=env, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


def test_a_script_asks_for_all_ranks_of_a_machine_together(tmp_path, capsys):
    slurm.main(write_config(tmp_path, SCHEDULING))
    script = capsys.readouterr().out
    log = f"'{tmp_path / 'my run' / 'logs' / 'trainer-%j.log'}'"
    assert options_of(script) == OPTIONS | {"output": log}


def test_a_script_starts_torchrun_on_a_configuration_that_loads(tmp_path, capsys):
    slurm.main(write_config(tmp_path, SCHEDULING))
    *words, added = run_script(capsys.readouterr().out, tmp_path)
    file = tmp_path / "my run" / "configs" / "trainer.yaml"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    torchrun += ["--nproc-per-node", "4", "--rdzv-backend", "c10d", "--rdzv-id", "7"]
    torchrun += ["--rdzv-endpoint", "node-1:29500", "-m", "trainer", "--config", str(file)]
    assert words == ["--kill-on-bad-exit=1", "--cpus-per-task=12", *torchrun]
    assert added == "NCCL_DEBUG=it's $HOME"
    assert load_config(SFTExperiment, ["--config", str(file)]).trainer.scheduling.nodes == 2


def test_a_job_that_slurm_starts_again_goes_on_from_its_checkpoint(tmp_path, capsys):
    slurm.main(write_config(tmp_path, {}, "grpo"))
    script = capsys.readouterr().out
    assert "--recovery.mode" not in run_script(script, tmp_path)
    words = run_script(script, tmp_path, SLURM_RESTART_COUNT="1")
    at = words.index("--recovery.mode")
    assert words[at + 1] == "auto"


def test_an_image_is_given_to_srun_and_brings_its_own_python(tmp_path, capsys):
    slurm.main(write_config(tmp_path, {"container_image": "registry/headway:1"}))
    words = run_script(capsys.readouterr().out, tmp_path)
    assert "--container-image=registry/headway:1" in words
    assert "python3" in words


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("partition", "long\n#SBATCH --uid=0"),
        ("nodelist", "a b"),
        ("time_limit", "soon"),
        ("time_limit", 43200),  # what YAML makes of 12:00:00
        ("env_vars", {"A B": "1"}),
        ("env_vars", {"A": "1\n2"}),
        ("gpu", 2),
        ("mem", 0),
    ],
    ids=["line", "words", "no_time", "number", "name", "lines", "devices", "memory"],
)
def test_what_slurm_cannot_mean_is_refused(tmp_path, name, value):
    with pytest.raises(ConfigError, match=rf"trainer\.scheduling\.{name}"):
        slurm.main(write_config(tmp_path, {name: value}))


def test_an_unknown_experiment_is_refused_with_the_known_ones(tmp_path):
    file = tmp_path / "other.yaml"
    file.write_text("type: gateway")
    with pytest.raises(ConfigError, match=r"type=gateway is no experiment .* grpo"):
        slurm.main(["--config", str(file)])


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm's sbatch is not installed")
def test_sbatch_knows_every_option(tmp_path):
    file = tmp_path / "slurm.conf"
    file.write_text("ClusterName=here\nSlurmctldHost=localhost\n")
    env = {**os.environ, "SLURM_CONF": str(file)}
    done = subprocess.run(
        ["sbatch", "--help"], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    names = {*OPTIONS, "output"} - {"open-mode"}  # taken, but not in the help
    assert [name for name in names if f"--{name}=" not in done.stdout] == []


def test_ranks_that_train_on_gpus_ask_for_them(tmp_path, capsys):
    argv = write_config(tmp_path, {"ranks_per_node": 4})
    slurm.main(argv)
    assert "gres" not in options_of(capsys.readouterr().out)
    slurm.main([*argv, "--trainer.device", "cuda"])
    assert options_of(capsys.readouterr().out)["gres"] == "gpu:4"
    with pytest.raises(ConfigError, match=r"scheduling\.gpu=0 asks for none"):
        slurm.main([*argv, "--trainer.device", "cuda", "--trainer.scheduling.gpu", "0"])
