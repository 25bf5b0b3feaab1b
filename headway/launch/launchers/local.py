"""All processes of a run on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.errors import ConfigError
from headway.launch.launchers.placement import place
from headway.launch.launchers.preload import PRELOADED, child_environment
from headway.launch.launchers.run import GATEWAY, Run
from headway.launch.launchers.version_store import discard_versions
from headway.runtime.config import dump_yaml
from headway.runtime.fork_server import ForkServer
from headway.runtime.gpus import GpuSurvey, survey_gpus
from headway.runtime.process import Process, ProcessSpec


class LocalRun(Run):
    """Forks them from one that has imported what they need."""

    def __init__(
        self,
        config: LaunchConfig,
        fork_server: ForkServer | None = None,
        survey: GpuSurvey | None = None,
    ) -> None:
        """Give every process its devices.

        Args:
            fork_server: what processes are forked from; None makes one in `start`, for this run.
            survey: GPUs of this machine; None asks the driver.
        Raises:
            ConfigError: there are fewer than the processes want; or the servers are to be more or fewer.
        """
        super().__init__(config)
        if config.max_servers is not None:
            raise ConfigError(
                "max_servers is for runs on Ray (`headway ray`); on one machine, set num_servers"
            )
        self._placement = place(config, survey or survey_gpus(), os.environ)
        self._fork_server = fork_server
        self._own_fork_server: ForkServer | None = None
        self._owns_versions = False

    def start(self) -> None:
        if self._fork_server is None:
            environment = child_environment(self._num_threads())
            self._fork_server = self._own_fork_server = ForkServer(PRELOADED, environment)
        super().start()

    def start_process(self, spec: ProcessSpec) -> Process:
        """The gateway imports little: it is up before a new fork server has imported the rest."""
        forks = self._fork_server
        if spec.name == GATEWAY and forks is not None and not forks.is_ready():
            forks = None
        return Process(spec, forks)

    def environment(self, name: str) -> Mapping[str, str]:
        threads = child_environment(self._num_threads())
        return {**threads, **self._placement.environment(name)}

    def on_gateway(self) -> None:
        """Free the memory that a killed run has left."""
        self._owns_versions = True
        discard_versions(self._config)

    def close(self) -> None:
        if self._owns_versions:
            discard_versions(self._config)
        if self._own_fork_server is not None:
            self._own_fork_server.close()
            self._fork_server = self._own_fork_server = None

    def _num_threads(self) -> int | None:
        """Return the number of threads of each process; more threads than cores mostly wait for one
        another."""
        given = self._config.threads_per_process
        if given is not None or "OMP_NUM_THREADS" in os.environ:
            return given
        num_processes = self._config.num_servers + self._config.num_trainer_ranks
        return max(1, len(os.sched_getaffinity(0)) // num_processes)


def run_module(
    name: str, module: str, config: BaseModel, run_dir: Path, threads: int | None
) -> Process:
    """Start one module on a config of its own, for a job that ends by itself."""
    file = run_dir / "configs" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_yaml(config))
    argv = [sys.executable, "-m", module, "--config", str(file)]
    log = run_dir / "logs" / f"{name}.log"
    return Process(ProcessSpec(name, argv, log, child_environment(threads)))
