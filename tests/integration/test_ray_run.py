"""A run on a Ray cluster: processes of servers and trainer die and come back, servers come and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.errors import ConfigError
from headway.runtime.config import validate_config
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.driving import END_S, START_S, steps_of, until_checkpoint, until_steps
from tests.ray_cluster import ray_cluster
from tests.waiting import eventually

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]
STEPS = 16


@pytest.fixture(scope="module")
def ray_run() -> Iterator[Any]:
    """The module under test, beside a cluster; it loads Ray, which changes all log records."""
    with ray_cluster():
        yield import_module("headway.launch.launchers.ray_cluster")


def opened(config: LaunchConfig, **changes: Any) -> LaunchConfig:
    """A run that other machines may reach."""
    tree = config.model_dump(mode="json")
    for name in ("gateway", "server"):
        tree[name]["service"]["allow_anonymous"] = True
    return validate_config(LaunchConfig, {**tree, **changes})


def kill(run: Any, name: str) -> None:
    """Kill a process, not its actor; returns once that is known."""
    process = run.process(name)
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: process.exit_code() is not None, 30, f"{name} is dead")


def test_a_run_outlives_its_processes(
    ray_run: Any, make_config: Callable[..., LaunchConfig]
) -> None:
    config = make_config(
        steps=STEPS,
        num_servers=2,
        recovery={"mode": "auto", "every_steps": 2, "retry_after_s": 0.0},
    )
    with ray_run.RayRun(opened(config)) as run:
        run.start()
        client = RemoteInferenceEngine(run.url, connect_timeout_s=START_S)

        def ready() -> int:
            return [server.state for server in client.status().servers].count("ready")

        until_steps(config, 2)
        kill(run, "server-0")
        assert run.watch() is None
        until_checkpoint(config)
        kill(run, "trainer")
        assert run.watch() is None
        run.resize(3)
        eventually(lambda: ready() == 3, START_S, "three servers are ready")
        run.resize(1)
        eventually(lambda: ready() == 1, START_S, "one server is left")
        eventually(lambda: run.watch() is not None, END_S, "the trainer has ended")
        assert run.watch() == 0, run.process("trainer").log_tail()
        assert [step["step"] for step in steps_of(config)] == list(range(STEPS))
        audit = client.audit()
        assert (audit.lost, audit.duplicated) == (0, 0)
        client.destroy()


def test_what_ray_cannot_do_is_refused(
    ray_run: Any, make_config: Callable[..., LaunchConfig]
) -> None:
    config = make_config(weight_sync={"type": "http", "root": "weights"})
    with pytest.raises(ConfigError, match="reaches no server on another machine"):
        ray_run.RayRun(opened(config))
    with pytest.raises(ConfigError, match=r"gateway\.service is to be reached from other machines"):
        ray_run.RayRun(make_config())
    wanted = {"server": {"partition": "long"}}
    with pytest.raises(ConfigError, match="partition is asked for the server"):
        ray_run.RayRun(opened(make_config(), scheduling=wanted))
