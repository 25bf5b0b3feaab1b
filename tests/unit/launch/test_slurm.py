"""The batch script: its options as Slurm writes them, and what it runs, run."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headway.contracts.config.experiment import GRPOExperiment, SFTExperiment
from headway.contracts.config.server import ServerConfig
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
    words = [line.removeprefix("#SBATCH --").partition("=") for line in lines]
    return {name: value for name, _, value in words}


def run_script(script: str, folder: Path, **environment: str) -> list[str]:
    """The words that srun is called with, one a line; then the added variable."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    commands = {
        "scontrol": "echo node-1; echo node-2",
        "srun": 'printf "%s\\n" "$@" "NCCL_DEBUG=${NCCL_DEBUG:-}"',
        "scancel": 'printf "%s\\n" scancel "$@"',
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
    name = slurm.job_name(tmp_path / "my run")
    assert options_of(script) == OPTIONS | {"output": log, "job-name": name}


def test_runs_whose_folders_end_alike_have_other_names(tmp_path):
    one, other = (slurm.job_name(tmp_path / place / "my run") for place in ("a", "b"))
    assert one != other and one.endswith("-my_run") and other.endswith("-my_run")


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


def write_run(folder: Path, **changes: dict) -> list[str]:
    tree = {
        "model": "model",
        "num_servers": 3,
        "gateway": {"service": {"allow_anonymous": True}},
        "server": {
            "service": {"allow_anonymous": True},
            "backend": {"type": "sglang", "args": {"--tp-size": 2}},
        },
        "trainer": {
            "run_dir": str(folder / "my run"),
            "data": {"path": "rows.jsonl"},
            "rollout": {"reward": {"name": "exact"}},
            "recovery": {"mode": "auto", "retries": 4, "retry_after_s": 0},
        },
        **changes,
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    return ["--config", str(file)]


def scripts_of(folder: Path) -> dict[str, str]:
    scripts = (folder / "my run" / "slurm").glob("*.sh")
    return {file.stem: file.read_text() for file in scripts}


def test_a_run_is_a_gateway_an_array_of_servers_and_a_trainer(tmp_path, capsys):
    scheduling = {"server": {"cpu": 6, "partition": "gpus", "env_vars": {"A": "b c"}}}
    slurm.main(write_run(tmp_path, scheduling=scheduling))
    commands = capsys.readouterr().out.splitlines()
    removing, *submitting = commands
    assert [line.count("--dependency=after:$gateway") for line in submitting] == [0, 1, 1]
    assert removing == f"rm -f '{tmp_path}/my run/configs/gateway.ready.json'"
    scripts = scripts_of(tmp_path)
    gateway, server, trainer = (options_of(scripts[n]) for n in ("gateway", "server", "trainer"))
    name = slurm.job_name(tmp_path / "my run")
    assert gateway["job-name"] == f"{name}-gateway" and "gres" not in gateway
    assert server["job-name"] == f"{name}-server"
    assert (server["array"], server["gres"], server["cpus-per-task"]) == ("0-2", "gpu:2", "6")
    assert server["partition"] == "gpus"
    assert "export A='b c'" in scripts["server"]
    assert trainer["job-name"] == name
    configs = tmp_path / "my run" / "configs"
    written = load_config(ServerConfig, ["--config", str(configs / "server.yaml")])
    sync = load_config(GRPOExperiment, ["--config", str(configs / "trainer.yaml")]).weight_sync
    assert sync.root == str(tmp_path / "my run" / "weights")
    assert written.weights.allow == (sync.origin,)


def test_jobs_of_a_run_wait_for_the_gateway_and_end_with_the_trainer(tmp_path):
    slurm.main(write_run(tmp_path))
    ready = tmp_path / "my run" / "configs" / "gateway.ready.json"
    ready.write_text('{"url": "http://node-1:8000"}')
    slurm.main(write_run(tmp_path))  # until they are submitted, a run that goes on keeps its file
    scripts, here = scripts_of(tmp_path), {"SLURMD_NODENAME": "node-2"}
    words = run_script(scripts["server"], tmp_path, **here)
    assert words[words.index("--gateway") + 1] == "http://node-1:8000"
    assert words[words.index("--service.host") + 1] == "node-2"
    words, name = (
        run_script(scripts["trainer"], tmp_path, **here),
        slurm.job_name(tmp_path / "my run"),
    )
    assert words[words.index("--rollout.url") + 1] == "http://node-1:8000"
    assert words[-6:] == [
        *("scancel", f"--user={getpass.getuser()}", f"--name={name}-server"),
        *("scancel", f"--user={getpass.getuser()}", f"--name={name}-gateway"),
    ]
    words = run_script(scripts["gateway"], tmp_path, **here)
    assert words[words.index("--service.host") + 1] == "node-2"
    assert not ready.exists()


@pytest.mark.parametrize(("status", "starts"), [(0, 1), (1, 5), (2, 1)])
def test_a_trainer_that_fails_is_started_again_in_its_job(tmp_path, status, starts):
    slurm.main(write_run(tmp_path))
    (tmp_path / "my run" / "configs" / "gateway.ready.json").write_text('{"url": "http://a:1"}')
    tools = tmp_path / "tools"
    tools.mkdir()
    log = tmp_path / "starts"
    bodies = {
        "srun": f'echo "$@" >> {log}; exit {status}',
        "scontrol": "echo node-1",
        "scancel": f"echo over >> {log}",
    }
    for name, body in bodies.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    env = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node-1",
    }
    script = scripts_of(tmp_path)["trainer"]
    done = subprocess.run(["bash"], input=script, env=env, text=True, check=False, timeout=60)
    assert done.returncode == status
    *lines, last, very_last = log.read_text().splitlines()
    assert (last, very_last) == ("over", "over")
    assert [("--recovery.mode auto" in line) for line in lines] == [False] + [True] * (starts - 1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gateway": {}}, r"gateway\.service is to be reached from other machines"),
        ({"server": {"backend": {"type": "fake"}}}, r"server\.service is to be reached"),
    ],
)
def test_a_run_that_cannot_be_spread_is_refused(tmp_path, changes, told):
    with pytest.raises(ConfigError, match=told):
        slurm.main(write_run(tmp_path, **changes))


def test_weights_go_where_other_machines_reach_them(tmp_path):
    argv = write_run(tmp_path)
    with pytest.raises(ConfigError, match=r"type=http reaches no server on another machine"):
        slurm.main([*argv, "--trainer.weight-sync.type", "http", "--trainer.weight-sync.root", "w"])
    slurm.main([*argv, "--trainer.weight-sync.type", "collective"])
    assert '--weight-sync.host "$first"' in scripts_of(tmp_path)["trainer"]
    written = tmp_path / "my run" / "configs" / "server.yaml"
    assert load_config(ServerConfig, ["--config", str(written)]).weights.allow == ("gloo:",)
