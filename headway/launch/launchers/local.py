"""All processes of a run on this machine.

The gateway comes first (its URL goes into the others' configs), then the servers, then the trainer.
A server or gateway that dies is started again, up to `max_restarts` times; rollouts that were lost
with it go back to the ledger by themselves. A trainer that fails is started again from its newest
checkpoint as often as `recovery` of its configuration allows; after that, or where its user has to mend
the input, it ends the run. Every process's own configuration is in `run_dir/configs`, and that of the
whole run in `run.yaml` beside them.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import BaseModel

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.errors import ServiceError
from headway.launch.launchers.placement import place
from headway.launch.launchers.preload import PRELOADED, child_environment
from headway.launch.launchers.roles import gateway_config, server_config, trainer_config
from headway.launch.launchers.version_store import discard_versions
from headway.runtime.command import EXIT_USAGE
from headway.runtime.config import dump_yaml
from headway.runtime.fork_server import ForkServer
from headway.runtime.gpus import GpuSurvey, survey_gpus
from headway.runtime.process import Process, ProcessSpec
from headway.runtime.secret import read_token

log = logging.getLogger(__name__)

GRACE_S = 15.0


class LocalRun:
    """Starts a run, keeps it alive, ends it; a context manager that leaves no process behind."""

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
            ConfigError: there are fewer than the processes want.
        """
        self._config = config
        self._placement = place(config, survey or survey_gpus(), os.environ)
        self._fork_server = fork_server
        self._own_fork_server: ForkServer | None = None
        self._owns_versions = False
        self._run_dir = Path(config.trainer.run_dir).resolve()
        self._processes: dict[str, Process] = {}
        self._restarts = 0
        self._retries = 0
        self._retry_at: float | None = None
        """Time at which a failed trainer is started again, by the monotonic clock."""
        self._stopping = threading.Lock()
        self.url = ""
        self.token = read_token(config.gateway.service.env_for("consume"))
        """Token of the gateway's callers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything side by side; returns once all servers are ready."""
        self._write_config("run", self._config)
        if self._fork_server is None:
            environment = child_environment(self._num_threads())
            self._fork_server = self._own_fork_server = ForkServer(PRELOADED, environment)
        self.start_gateway()
        # The gateway holds the ledger: no other run uses this run folder, a killed one may have.
        self._owns_versions = True
        discard_versions(self._config)
        self._launch_servers()
        self.start_trainer()
        self._wait_for_servers()

    def start_gateway(self) -> None:
        """Start the gateway and learn its URL."""
        service = gateway_config(self._config, self._ready_file("gateway"))
        self._launch("gateway", _module("headway.launch.cli", "gateway"), service)
        self.url = self._processes["gateway"].wait_ready(self._config.start_timeout_s)
        # A gateway that is started again must be found where it was.
        port = int(self.url.rsplit(":", 1)[1])
        service = service.model_copy(
            update={"service": service.service.model_copy(update={"port": port})}
        )
        self._write_config("gateway", service)

    def start_servers(self) -> None:
        """Start all generation servers, then wait until each is ready."""
        self._launch_servers()
        self._wait_for_servers()

    def _launch_servers(self) -> None:
        for name in self._servers():
            server = server_config(self._config, self.url, self._ready_file(name))
            self._launch(name, _module("inference_server"), server)

    def _wait_for_servers(self) -> None:
        for name in self._servers():
            self._processes[name].wait_ready(self._config.start_timeout_s)

    def _servers(self) -> list[str]:
        return [f"server-{number}" for number in range(self._config.num_servers)]

    def start_trainer(self, resumes: bool = False) -> None:
        """Start the trainer, under torchrun if it has several ranks.

        Args:
            resumes: it goes on from its newest checkpoint, if there is one, whatever its configuration
                says.
        """
        trainer = trainer_config(self._config, self.url, resumes)
        ranks = self._config.num_trainer_ranks
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        module = _module("trainer") if ranks == 1 else _module(*torchrun, "trainer")
        self._launch("trainer", module, trainer)

    def watch(self) -> int | None:
        """Restart what died; the trainer's exit status once it has ended for good, else None.

        Raises:
            ServiceError: a service died more often than `max_restarts`; with the end of its log.
        """
        for name, process in list(self._processes.items()):
            code = process.exit_code()
            if name == "trainer" or code is None:
                continue
            if self._restarts >= self._config.max_restarts:
                raise ServiceError(
                    f"{name} ended with status {code} after {self._restarts} restarts in this run:\n"
                    f"{process.log_tail()}"
                )
            self._restarts += 1
            self._processes[name] = Process(process.spec, self._fork_server)
        return self._watch_trainer()

    def _watch_trainer(self) -> int | None:
        """The trainer's exit status once it has ended and is not started again, else None."""
        trainer = self._processes.get("trainer")
        code = None if trainer is None else trainer.exit_code()
        recovery = self._config.trainer.recovery
        if code in (None, 0, EXIT_USAGE) or self._retries >= recovery.max_retries:
            return code
        if self._retry_at is None:
            self._retry_at = time.monotonic() + recovery.retry_after_s
            log.warning(
                "the trainer failed and is started again",
                extra={"status": code, "after_s": recovery.retry_after_s},
            )
        if time.monotonic() >= self._retry_at:
            self._retries, self._retry_at = self._retries + 1, None
            self.start_trainer(resumes=True)
        return None

    def process(self, name: str) -> Process:
        """A started process, for example `trainer` or `server-0`."""
        return self._processes[name]

    def terminate_servers(self) -> None:
        """Send the servers SIGTERM and return at once; `stop` waits for them."""
        for name in self._servers():
            if name in self._processes:
                self._processes[name].signal(signal.SIGTERM)

    def stop(self) -> None:
        """End every process, the trainer first; whoever calls again waits for the same end."""
        with self._stopping:
            for name in reversed(self._processes):  # started last, stopped first
                self._processes[name].stop(GRACE_S)
            self._processes.clear()
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

    def _launch(self, name: str, command: list[str], config: BaseModel) -> None:
        self._write_config(name, config)
        argv = [*command, "--config", str(self._config_file(name))]
        spec = ProcessSpec(
            name=name,
            argv=argv,
            log=self._run_dir / "logs" / f"{name}.log",
            env={
                **child_environment(self._num_threads()),
                **self._placement.environment(name),
            },
            ready_file=None if name == "trainer" else self._ready_file(name),
        )
        self._processes[name] = Process(spec, self._fork_server_for(name))

    def _fork_server_for(self, name: str) -> ForkServer | None:
        """The gateway imports little: it is up before a new fork server has imported the rest."""
        if name == "gateway" and self._fork_server is not None and not self._fork_server.is_ready():
            return None
        return self._fork_server

    def _write_config(self, name: str, config: BaseModel) -> None:
        file = self._config_file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dump_yaml(config))

    def _config_file(self, name: str) -> Path:
        return self._run_dir / "configs" / f"{name}.yaml"

    def _ready_file(self, name: str) -> Path:
        return self._run_dir / "configs" / f"{name}.ready.json"


def run_module(
    name: str, module: str, config: BaseModel, run_dir: Path, threads: int | None
) -> Process:
    """Start one module on a config of its own, for a job that ends by itself."""
    file = run_dir / "configs" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_yaml(config))
    argv = [*_module(module), "--config", str(file)]
    log = run_dir / "logs" / f"{name}.log"
    return Process(ProcessSpec(name, argv, log, child_environment(threads)))


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]
