"""Whole runs: trainer, gateway and servers as processes, to the end and through crashes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.ledger.lock import sole_gateway
from headway.contracts.config.launch import LaunchConfig, shared_root
from headway.contracts.errors import ServiceError
from headway.launch.launchers.local import LocalRun
from headway.runtime.config import dump_yaml, load_config, validate_config
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.driving import finish, kill, resume, steps_of, until_steps
from tests.processes import local_run
from tests.waiting import eventually

SHORT_RUN = (
    "test_a_run_consumes_exactly_its_batches[0-1-grpo]",
    "test_a_killed_trainer_resumes_without_losing_or_repeating_a_trajectory[from_a_checkpoint]",
    "test_a_run_survives_its_server_and_its_gateway",
    "test_a_run_that_cannot_start_leaves_the_memory_of_the_one_that_runs",
    "test_ending_the_command_leaves_no_process_and_no_half_written_version[9]",
)

MakeConfig = Callable[..., LaunchConfig]
Start = Callable[[LaunchConfig], LocalRun]
Connect = Callable[[str], RemoteInferenceEngine]
BATCH = 16


PPO = {
    "type": "ppo",
    "critic": {"normalization": "cumulative"},
    "algorithm": {"kl_in": "reward", "kl_coef": 0.1, "kl_target": 0.01, "num_minibatches": 2},
    "reference": {"ema_eta": 0.1},
}
"""Everything that a policy experiment can hold but a teacher."""


@pytest.mark.parametrize(
    ("max_staleness", "ranks", "sections"),
    [(0, 1, {}), (2, 1, {}), (1, 2, {}), (1, 1, PPO), (1, 2, PPO)],
    ids=["0-1-grpo", "2-1-grpo", "1-2-grpo", "1-1-ppo", "1-2-ppo"],
)
def test_a_run_consumes_exactly_its_batches(
    make_config: MakeConfig,
    start: Start,
    connect: Connect,
    max_staleness: int,
    ranks: int,
    sections: dict[str, Any],
) -> None:
    config = make_config(steps=5, max_staleness=max_staleness, num_trainer_ranks=ranks, **sections)
    run = start(config)
    run.start_trainer()
    finish(run)
    audit = connect(run.url).audit()
    assert (audit.lost, audit.duplicated) == (0, 0)
    assert audit.counts.consumed == 5 * BATCH
    assert audit.counts.submitted == audit.counts.consumed + audit.counts.cancelled
    assert audit.max_staleness <= max_staleness
    steps = steps_of(config)
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
    assert max(step["staleness_max"] for step in steps) <= max_staleness
    # The server's logprobs are the trainer's own where both have the same weights.
    assert steps[0]["behaviour_kl"] < 1e-6
    folder = Path(config.trainer.run_dir)
    assert (folder / "model" / "model.safetensors").is_file()
    assert (folder / "critic" / "model.safetensors").is_file() == (config.trainer.type == "ppo")
    if config.trainer.type == "ppo":
        assert all(math.isfinite(step["value_loss"]) for step in steps)
        assert steps[0]["reference_kl"] < 1e-6 and steps[4]["kl_coef"] != 0.1


def test_rollouts_of_a_configured_call_run_when_their_step_begins(
    make_config: MakeConfig, start: Start, connect: Connect
) -> None:
    call = {"name": "actor_gen", "kind": "generate", "interface": {"name": "rollout"}}
    config = make_config(steps=4, max_staleness=0, dataflow={"calls": [call]})
    run = start(config)
    run.start_trainer()
    finish(run)
    steps = steps_of(config)
    assert [step["version"] for step in steps] == [0, 1, 2, 3]
    assert [step["staleness_max"] for step in steps] == [0, 0, 0, 0]
    assert [step["trajectories"] for step in steps] == [BATCH] * 4
    assert all(step["behaviour_kl"] < 1e-6 for step in steps)
    audit = connect(run.url).audit()
    assert (audit.lost, audit.duplicated) == (0, 0)


@pytest.mark.parametrize(
    ("every_steps", "sections"),
    [(2, {}), (100, {}), (2, PPO)],
    ids=["from_a_checkpoint", "from_the_start", "ppo"],
)
def test_a_killed_trainer_resumes_without_losing_or_repeating_a_trajectory(
    make_config: MakeConfig,
    start: Start,
    connect: Connect,
    every_steps: int,
    sections: dict[str, Any],
) -> None:
    config = make_config(steps=7, every_steps=every_steps, **sections)
    run = start(config)
    run.start_trainer()
    # With a checkpoint every 2 steps, one step is beyond the last one; without any, everything that
    # waits is too stale for the restored weights, is dropped, and has to be replaced.
    done = 3 if every_steps == 2 else 5
    until_steps(config, done)
    kill(run, "trainer")
    assert run.watch() == -signal.SIGKILL
    resume(run, config)
    audit = connect(run.url).audit()
    assert (audit.lost, audit.duplicated) == (0, 0)
    assert audit.counts.consumed == 7 * BATCH
    steps = steps_of(config)
    assert [step["step"] for step in steps] == list(range(7))
    versions = [step["version"] for step in steps]
    assert versions == sorted(set(versions)), "no version number is used twice"


def test_a_run_survives_its_server_and_its_gateway(
    make_config: MakeConfig, start: Start, connect: Connect
) -> None:
    config = make_config(steps=8)
    run = start(config)
    run.start_trainer()
    for name, done in (("server-0", 2), ("gateway", 4)):
        eventually(
            lambda n=done: run.watch() is None and len(steps_of(config)) >= n,
            90,
            f"{done} steps are done",
        )
        os.kill(run.process(name).pid, signal.SIGKILL)
    finish(run)
    audit = connect(run.url).audit()
    assert (audit.lost, audit.duplicated) == (0, 0)
    assert audit.counts.consumed == 8 * BATCH


COMMAND = [sys.executable, "-m", "headway.launch.cli", "run", "--config"]


def summary_of(*command: str) -> dict[str, Any]:
    """What a run prints last; it must not fail."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_run_command_prints_its_summary(make_config: MakeConfig, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    config = make_config(steps=3)
    file.write_text(dump_yaml(config))
    summary = summary_of(*COMMAND, str(file))
    assert (summary["steps"], summary["trajectories"]) == (3, 3 * BATCH)
    assert (summary["lost"], summary["duplicated"]) == (0, 0)
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "run" / "config.resolved.yaml").is_file()
    whole = tmp_path / "run" / "configs" / "run.yaml"
    assert load_config(LaunchConfig, ["--config", str(whole)]) == config


def test_an_interrupted_run_over_shared_memory_resumes_and_leaves_none_behind(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """No `weight_sync` at all: the command chooses, and what it chose is gone when it ends."""
    file = tmp_path / "run.yaml"
    tree = make_config(steps=6).model_dump(mode="json")
    del tree["trainer"]["weight_sync"]
    file.write_text(yaml.safe_dump(tree))
    command = [*COMMAND, str(file)]
    memory = Path(shared_root(tree["trainer"]["run_dir"]))
    config = validate_config(LaunchConfig, tree)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as begun:
        try:
            eventually(lambda: len(steps_of(config)) >= 3, 90, "three steps are done")
            assert memory.is_dir()
        finally:
            begun.terminate()
            begun.communicate(timeout=60)
    assert not memory.exists()
    summary = summary_of(*command, "--trainer.recovery.mode", "resume")
    assert (summary["steps"], summary["lost"], summary["duplicated"]) == (6, 0, 0)
    assert not memory.exists()


def test_a_run_that_cannot_start_leaves_the_memory_of_the_one_that_runs(
    make_config: MakeConfig,
) -> None:
    """Both have the same run folder, and so the same place in shared memory."""
    tree = make_config().model_dump(mode="json")
    del tree["trainer"]["weight_sync"]
    config = validate_config(LaunchConfig, tree)
    memory = Path(shared_root(config.trainer.run_dir))
    memory.mkdir()
    try:
        with (
            sole_gateway(config.gateway.ledger),
            pytest.raises(ServiceError, match="gateway ended with status"),
            local_run(config) as run,
        ):
            run.start()
        assert memory.is_dir()
    finally:
        memory.rmdir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_the_command_leaves_no_process_and_no_half_written_version(
    make_config: MakeConfig, tmp_path: Path, number: signal.Signals
) -> None:
    config = make_config(steps=10_000)
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(config))
    command = subprocess.Popen(
        [*COMMAND, str(file)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_heed_interrupts,
    )
    try:
        eventually(lambda: len(steps_of(config)) >= 2, 90, "two steps are done")
        assert len(processes_of(tmp_path)) >= 3
    finally:
        command.send_signal(number)
        code = command.wait(60)
    assert code == (130 if number != signal.SIGKILL else -signal.SIGKILL)
    eventually(lambda: processes_of(tmp_path) == [], 30, "every process is gone")
    versions = list((tmp_path / "weights").glob("v*"))
    assert versions and all((version / "manifest.json").is_file() for version in versions)


def _heed_interrupts() -> None:
    """A shell has what it starts in the background ignore them, and these tests with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names a config of this run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"{folder}/run/configs/".encode() in command:
                found.append(int(entry.name))
    return found
