"""The processes of a run, wherever they are started.

The gateway comes first (its URL goes into the others' configs), then the servers, then the trainer.
A server or gateway that dies is started again, up to `max_restarts` times; rollouts that were lost
with it go back to the ledger by themselves. A trainer that fails is started again from its newest
checkpoint as often as `recovery` of its configuration allows; after that, or where its user has to mend
the input, it ends the run. Every process's own configuration is in `run_dir/configs`, and that of the
whole run in `run.yaml` beside them.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from pydantic import BaseModel

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.errors import ServiceError
from headway.launch.launchers.roles import gateway_config, server_config, trainer_config
from headway.runtime.command import EXIT_USAGE
from headway.runtime.config import dump_yaml
from headway.runtime.process import ProcessSpec, StartedProcess
from headway.runtime.secret import read_token

log = logging.getLogger(__name__)

GATEWAY = "gateway"
TRAINER = "trainer"
GRACE_S = 15.0


class Run(ABC):
    """Starts a run, keeps it alive, ends it; a context manager that leaves no process behind."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._run_dir = Path(config.trainer.run_dir).resolve()
        self._servers = [f"server-{number}" for number in range(config.num_servers)]
        self._processes: dict[str, StartedProcess] = {}
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

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def start_process(self, spec: ProcessSpec) -> StartedProcess:
        """Start one, or start it again."""

    def environment(self, name: str) -> Mapping[str, str]:
        """Return the variables that a process gets besides its parent's."""
        return {}

    def words(self, name: str) -> Sequence[str]:
        """Return the flags that a process gets besides its configuration."""
        return ()

    @abstractmethod
    def on_gateway(self) -> None:
        """The gateway serves, and holds the ledger: no other run uses this run folder."""

    def start(self) -> None:
        """Start everything side by side; returns once all servers are ready."""
        self._write_config("run", self._config)
        self.start_gateway()
        self.on_gateway()
        self._launch_servers()
        self.start_trainer()
        self._wait_for_servers()

    def start_gateway(self) -> None:
        """Start the gateway and learn its URL."""
        service = gateway_config(self._config, self._ready_file(GATEWAY))
        self._launch(GATEWAY, _module("headway.launch.cli", "gateway"), service)
        self.url = self._processes[GATEWAY].wait_ready(self._config.start_timeout_s)
        # A gateway that is started again must be found where it was.
        port = int(self.url.rsplit(":", 1)[1])
        service = service.model_copy(
            update={"service": service.service.model_copy(update={"port": port})}
        )
        self._write_config(GATEWAY, service)

    def start_servers(self) -> None:
        """Start all generation servers, then wait until each is ready."""
        self._launch_servers()
        self._wait_for_servers()

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
        self._launch(TRAINER, module, trainer)

    def watch(self) -> int | None:
        """Restart what died; the trainer's exit status once it has ended for good, else None.

        Raises:
            ServiceError: a service died more often than `max_restarts`; with the end of its log.
        """
        for name in (GATEWAY, *self._servers):
            process = self._processes.get(name)
            code = None if process is None else process.exit_code()
            if process is None or code is None:
                continue
            if self._restarts >= self._config.max_restarts:
                raise ServiceError(
                    f"{name} ended with status {code} after {self._restarts} restarts in this run:\n"
                    f"{process.log_tail()}"
                )
            self._restarts += 1
            self._processes[name] = self.start_process(process.spec)
        return self._watch_trainer()

    def process(self, name: str) -> StartedProcess:
        """A started process, for example `trainer` or `server-0`."""
        return self._processes[name]

    def terminate_servers(self) -> None:
        """Send the servers SIGTERM and return at once; `stop` waits for them."""
        for name in self._servers:
            if name in self._processes:
                self._processes[name].signal(signal.SIGTERM)

    def stop(self) -> None:
        """End every process, the trainer first; a second call waits for the same end."""
        with self._stopping:
            for name in reversed(self._processes):  # started last, stopped first
                self._processes[name].stop(GRACE_S)
            self._processes.clear()
            self.close()

    @abstractmethod
    def close(self) -> None:
        """Give up what the run used, once all its processes have ended."""

    def launch_server(self, name: str) -> None:
        """Start one of the generation servers."""
        server = server_config(self._config, self.url, self._ready_file(name))
        self._launch(name, _module("inference_server"), server)

    def _launch_servers(self) -> None:
        for name in self._servers:
            self.launch_server(name)

    def _wait_for_servers(self) -> None:
        for name in self._servers:
            self._processes[name].wait_ready(self._config.start_timeout_s)

    def _watch_trainer(self) -> int | None:
        """The trainer's exit status once it has ended and is not started again, else None."""
        trainer = self._processes.get(TRAINER)
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

    def _launch(self, name: str, command: list[str], config: BaseModel) -> None:
        self._write_config(name, config)
        spec = ProcessSpec(
            name=name,
            argv=[*command, "--config", str(self._config_file(name)), *self.words(name)],
            log=self._run_dir / "logs" / f"{name}.log",
            env=self.environment(name),
            ready_file=None if name == TRAINER else self._ready_file(name),
        )
        self._processes[name] = self.start_process(spec)

    def _write_config(self, name: str, config: BaseModel) -> None:
        file = self._config_file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dump_yaml(config))

    def _config_file(self, name: str) -> Path:
        return self._run_dir / "configs" / f"{name}.yaml"

    def _ready_file(self, name: str) -> Path:
        return self._run_dir / "configs" / f"{name}.ready.json"


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]
