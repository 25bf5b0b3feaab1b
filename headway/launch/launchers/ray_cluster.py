"""The processes of a run on a Ray cluster: servers and trainer where Ray finds resources for them.

The gateway stays with the driver, whose machine has the URL. The run folder has to be on a file system
that all machines share: configurations, logs and weights are there. An actor keeps each process; Ray ends
actors with their driver, and an actor its process.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.scheduling import JobConfig
from headway.contracts.config.weight_sync import CollectiveSync
from headway.contracts.errors import ConfigError, ServiceError
from headway.launch.autoscale import look
from headway.launch.launchers.placement import gpus_of_server
from headway.launch.launchers.preload import child_environment
from headway.launch.launchers.run import GATEWAY, TRAINER, Run
from headway.launch.launchers.spread import allow_any_host, spread
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.process import Process, ProcessSpec, StartedProcess
from headway.runtime.ray_clusters import join_cluster

log = logging.getLogger(__name__)

HERE = "{here}"
"""Stands for the address of the machine that a process runs on."""
ANSWER_S = 10.0
LOOK_S = 15.0
"""Seconds between two looks at what waits, and at how many servers are wanted."""
OF_SLURM = (
    "nodelist",
    "exclude",
    "partition",
    "container_image",
    "time_limit",
    "begin",
    "deadline",
)


def _address() -> str:
    """Address of this machine in the cluster."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


class _Keeper:
    """Has one process, on a machine of the cluster; its methods run side by side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._sent_signal: signal.Signals | None = None

    def run(self, spec: ProcessSpec) -> int:
        """Exit status, once it has ended; a process ends with the thread that started it."""
        argv = [sys.executable, *(word.replace(HERE, _address()) for word in spec.argv[1:])]
        with self._lock:
            if self._sent_signal is not None:
                return -self._sent_signal
            self._process = Process(replace(spec, argv=argv))
        code = self._process.wait()
        return -signal.SIGKILL if code is None else code

    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def signal(self, number: signal.Signals) -> None:
        with self._lock:
            self._sent_signal = number
            if self._process is not None:
                self._process.signal(number)


class RayProcess(StartedProcess):
    """A process that an actor keeps."""

    def __init__(self, spec: ProcessSpec, resources: Mapping[str, Any]) -> None:
        super().__init__(spec)
        remote: Any = ray.remote
        self.resources = resources
        self._actor: Any = remote(max_concurrency=3, **resources)(_Keeper).remote()
        self._placed: Any = self._actor.pid.remote()
        self._ended: Any = self._actor.run.remote(spec)
        self._code: int | None = None

    def is_placed(self) -> bool:
        """True once a machine with its resources was found."""
        return bool(ray.wait([self._placed], timeout=0.0)[0])

    @property
    def pid(self) -> int:
        return int(ray.get(self._actor.pid.remote(), timeout=ANSWER_S))

    def exit_code(self) -> int | None:
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        if self._code is None and ray.wait([self._ended], timeout=timeout_s)[0]:
            try:
                self._code = int(ray.get(self._ended))
            except RayActorError:  # its machine is gone, or was never found
                self._code = -signal.SIGKILL
            ray.kill(self._actor)  # what it had is free
        return self._code

    def signal(self, number: signal.Signals) -> None:
        if self.exit_code() is None:
            ray.wait([self._actor.signal.remote(number)], timeout=ANSWER_S)

    def stop(self, grace_s: float) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.wait(0.0) is None:
                self.signal(number)
                self.wait(grace_s)
        ray.kill(self._actor)


class RayRun(Run):
    """Starts servers and trainer as Ray places them; the number of servers follows the work."""

    def __init__(self, config: LaunchConfig) -> None:
        """Join the cluster that RAY_ADDRESS names, or start one on this machine.

        Raises:
            ConfigError: the run cannot be spread over machines, or asks for what Ray has not.
        """
        config = spread(config)
        for role, job in _jobs(config):
            _refuse_slurm(role, job)
        if config.trainer.trainer.scheduling.nodes > 1:
            raise ConfigError(
                "trainer.trainer.scheduling.nodes is more than 1: `headway ray` starts a trainer on one "
                "machine, with num_trainer_ranks; take `headway slurm`, or the chart for Kubernetes"
            )
        self._leave = join_cluster(None)
        super().__init__(_at(_address(), config))
        self.name = "servers on Ray"
        self._numbers = itertools.count(config.num_servers)
        self._leaving: list[str] = []
        self._client: RemoteInferenceEngine | None = None
        self._look_at = time.monotonic() + LOOK_S

    def start_process(self, spec: ProcessSpec) -> StartedProcess:
        return (
            Process(spec) if spec.name == GATEWAY else RayProcess(spec, self._resources(spec.name))
        )

    def environment(self, name: str) -> Mapping[str, str]:
        given = child_environment(self._config.threads_per_process)
        tokens = {key: os.environ[key] for key in _variables(self._config) if key in os.environ}
        return {**given, **tokens, **self._job(name).env_vars}

    def words(self, name: str) -> Sequence[str]:
        if name == GATEWAY:
            return ()
        if name != TRAINER:
            return ("--service.host", HERE)
        is_collective = isinstance(self._config.trainer.weight_sync, CollectiveSync)
        return ("--weight-sync.host", HERE) if is_collective else ()

    def on_gateway(self) -> None:
        """Versions are in the run folder: nothing of a killed run is in memory."""

    def watch(self) -> int | None:
        for name in [
            name for name in self._leaving if self._processes[name].exit_code() is not None
        ]:
            self._leaving.remove(name)
            del self._processes[name]
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            self._tell_of_waiting()
            if self._config.max_servers is not None:
                self._scale(self._config.max_servers)
        return super().watch()

    def replicas(self) -> int:
        """Return how many servers there are to be."""
        return len(self._servers)

    def resize(self, replicas: int) -> None:
        """Start further servers, or tell the youngest to hand over what they have begun, and to end."""
        while len(self._servers) < replicas:
            name = f"server-{next(self._numbers)}"
            self.launch_server(name)
            self._servers.append(name)
        while len(self._servers) > replicas:
            name = self._servers.pop()
            self._leaving.append(name)
            self._processes[name].signal(signal.SIGTERM)

    def close(self) -> None:
        if self._client is not None:
            self._client.destroy()
        self._leave()

    def _tell_of_waiting(self) -> None:
        for name, process in self._processes.items():
            if isinstance(process, RayProcess) and not process.is_placed():
                log.warning(
                    "waits: no machine of the Ray cluster has what it asks for",
                    extra={"process": name, **process.resources},
                )

    def _scale(self, most: int) -> None:
        if self._client is None:
            self._client = RemoteInferenceEngine(self.url, ANSWER_S, token=self.token)
        try:
            look(self._client, self, self._config.num_servers, most)
        except ServiceError as error:  # the next look asks again
            log.warning("not scaled", extra={"why": str(error)})

    def _job(self, name: str) -> JobConfig:
        jobs = dict(_jobs(self._config))
        return jobs.get(name, jobs["server"])

    def _resources(self, name: str) -> dict[str, Any]:
        job, config = self._job(name), self._config
        count = config.num_trainer_ranks if name == TRAINER else 1
        if name == TRAINER:
            threads = config.trainer.trainer.num_threads
            gpus = int(config.trainer.trainer.device == "cuda")
        else:
            threads = getattr(config.server.backend, "num_threads", None)
            gpus = gpus_of_server(config.server)
        found = {
            "num_cpus": (job.cpu or threads or 1) * count,
            "num_gpus": (gpus if job.gpu is None else job.gpu) * count,
        }
        # Ray keeps others from memory that is asked for; the default asks for none.
        is_default = job.mem == JobConfig.model_fields["mem"].default
        return found if is_default else found | {"memory": (job.mem << 20) * count}


def _jobs(config: LaunchConfig) -> Iterator[tuple[str, JobConfig]]:
    yield GATEWAY, config.scheduling.gateway
    yield "server", config.scheduling.server
    yield TRAINER, config.trainer.trainer.scheduling


def _refuse_slurm(role: str, job: JobConfig) -> None:
    for name in OF_SLURM:
        if getattr(job, name) is not None:
            raise ConfigError(
                f"{name} is asked for the {role}, and Ray knows no such thing; leave it out, or take "
                "`headway slurm`"
            )


def _at(address: str, config: LaunchConfig) -> LaunchConfig:
    """The gateway listens where other machines reach it, and servers take what comes from any of them."""
    service = config.gateway.service.model_copy(update={"host": address})
    gateway = config.gateway.model_copy(update={"service": service})
    server = allow_any_host(config, config.server)
    return config.model_copy(update={"gateway": gateway, "server": server})


def _variables(config: LaunchConfig) -> set[str]:
    """Names of the environment variables that hold the run's tokens."""
    left: list[Any] = [config.model_dump(mode="json")]
    found: set[str] = set()
    while left:
        node = left.pop()
        if isinstance(node, dict):
            named = [v for k, v in node.items() if k == "env" or k.endswith("token_env")]
            found |= {name for name in named if isinstance(name, str)}
            left.extend(node.values())
        elif isinstance(node, list):
            left.extend(node)
    return found
