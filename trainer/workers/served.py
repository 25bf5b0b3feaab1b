"""A generation server beside each worker: any backend, SGLang and vLLM among them, generates for
`ppo-hybrid`.

Rank 0 stores each version once, in memory that the servers of its host read, or by another transport;
every worker's server takes it before the worker's prompts.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from headway.contracts.config.gateway import ServiceConfig
from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.config.weight_sync import (
    ReceiverConfig,
    SharedMemorySync,
    WeightSyncConfig,
)
from headway.contracts.config.workers import ServedGenerationConfig, WorkersConfig
from headway.contracts.errors import ServiceError, SyncError
from headway.contracts.types import LLMRequest, LLMResponse, WeightUpdateMeta
from headway.runtime.config import dump_yaml, validate_config
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.process import Process, ProcessSpec
from headway.runtime.tasks import all_or_none
from trainer.api import TrainEngine
from trainer.hybrid.transfer_cost import TransferCost
from trainer.topology import Topology
from trainer.workers.worker import RANK_VARIABLES
from weight_sync.transports.base import make_publisher

MEMORY = Path("/dev/shm")
PREFIX = "headway-workers-"
GRACE_S = 15.0


class PublishedModel(TrainEngine, Protocol):
    """A train engine that gives its weights as others know them."""

    def published_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor whole, adapters merged; collective."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters themselves."""


class ServedRollout:
    """`RolloutEngine` over servers, one for each rank."""

    def __init__(
        self, config: WorkersConfig, policy: TrainEngine, topology: Topology, **args: Any
    ) -> None:
        """Start this rank's server, and wait until it answers; collective.

        Args:
            args: of `ServedGenerationConfig`.
        Raises:
            ServiceError: it did not start; with the end of its log.
        """
        settings = validate_config(ServedGenerationConfig, args)
        self._policy = cast("PublishedModel", policy)
        self._topology = topology
        self._has_seeds = settings.seeds
        self._version = 0
        self.last_transfer: TransferCost | None = None
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._memory: Path | None = None
        sync = None if not topology.is_main else settings.weight_sync or self._in_memory()
        self._publisher = None if sync is None else make_publisher(sync)
        origin = topology.broadcast(None if sync is None else sync.origin)
        self._runner = asyncio.Runner()
        self._process = self._start(config.model, settings, origin)
        self._client = RemoteInferenceEngine(self._process.wait_ready(settings.start_timeout_s))

    def generate(self, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
        self._hand_over()
        if not self._has_seeds:
            requests = [_without_seed(request) for request in requests]
        return self._runner.run(all_or_none(map(self._client.agenerate, requests)))

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()
        self._client.destroy()
        self._process.stop(GRACE_S)
        if self._publisher is not None:
            self._publisher.close()
        for folder in (self._folder, self._memory):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _in_memory(self) -> WeightSyncConfig:
        """A place for versions; what workers that were killed have left goes."""
        for left in MEMORY.glob(f"{PREFIX}*"):
            pid = left.name.removeprefix(PREFIX)
            if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(left, ignore_errors=True)
        self._memory = MEMORY / f"{PREFIX}{os.getpid()}"
        return SharedMemorySync(root=str(self._memory), keep=1)

    def _start(self, model: ModelConfig, settings: ServedGenerationConfig, origin: str) -> Process:
        ready = self._folder / "ready.json"
        config = ServerConfig(
            service=ServiceConfig(port=0, ready_file=str(ready)),
            model=ModelConfig(
                path=model.path,
                dtype=settings.dtype or model.dtype,
                init_from_scratch=model.init_from_scratch,
            ),
            backend=settings.backend,
            weights=ReceiverConfig(allow=(origin,), peers=False),
        )
        file = self._folder / "server.yaml"
        file.write_text(dump_yaml(config))
        command = [sys.executable, "-m", "inference_server", "--config", str(file)]
        name = f"server of rank {self._topology.rank}"
        # An engine that takes itself for a rank of the workers' group would wait for it for ever.
        spec = ProcessSpec(
            name, command, self._folder / "log", ready_file=ready, unset=RANK_VARIABLES
        )
        return Process(spec)

    def _hand_over(self) -> None:
        """Bring the policy's weights to this rank's server; collective.

        Raises:
            SyncError: they could not be published, or the server refused them.
        """
        begin = time.perf_counter()
        self._version += 1
        tensors = self._policy.published_weights()
        path, failure = b"", None
        if self._publisher is not None:
            try:
                path = self._publisher.publish(self._version, tensors).path.encode()
            except ServiceError as error:
                failure = error
        # Gathering is collective: what rank 0 did not take, it takes part in all the same.
        deque(tensors, maxlen=0)
        path = self._topology.broadcast_bytes(path)
        if failure is not None:
            raise failure
        if not path:
            raise SyncError("the first rank could not publish its weights; see its error")
        self._client.update_weights(WeightUpdateMeta(self._version, path.decode())).result()
        model_bytes = sum(p.numel() * p.element_size() for _, p in self._policy.weights())
        copies = 1 + (self._publisher is not None)
        self.last_transfer = TransferCost(
            time.perf_counter() - begin, model_bytes, copies * model_bytes
        )


def _without_seed(request: LLMRequest) -> LLMRequest:
    return request.model_copy(update={"gconfig": request.gconfig.model_copy(update={"seed": None})})
