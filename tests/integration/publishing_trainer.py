"""A trainer that only publishes, as a process that stops at the traps of its test.

    announced      the gateway and the servers know of the version, nothing of it is written
    half           half of its buckets were written or sent
    unmanifested   all were, and what makes them a version was not

It begins as a resumed trainer does: it attaches, and takes the next number that nobody has seen.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.weight_sync import (
    CollectiveSync,
    DiskSync,
    HttpSync,
    SharedMemorySync,
)
from headway.contracts.errors import ServiceError
from headway.contracts.types import ConsumerSpec, WeightUpdateMeta
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.traps import Traps
from tests.processes import FORKS
from weight_sync.channel import WeightPublisher
from weight_sync.manifest import MANIFEST_NAME, content_digest, part_name
from weight_sync.model_dir import load_model
from weight_sync.publication import Publication
from weight_sync.published_tensors import buckets
from weight_sync.publisher import StoredPublisher
from weight_sync.transports.base import make_publisher
from weight_sync.transports.broadcast_buckets import pack
from weight_sync.transports.disk import LocalStore
from weight_sync.transports.http import HttpStore
from weight_sync.transports.ipc_group import IpcGroup
from weight_sync.transports.process_group import WeightGroup
from weight_sync.transports.rendezvous import TransferEpoch
from weight_sync.transports.shared_memory import SharedMemoryStore

CONNECT_S = 20.0
GRACE_S = 5.0
LIMIT_S = 30.0
"""For anything that must come to an end: more than all deadlines of a fleet together."""
BUCKET = 1 << 20
Sync = DiskSync | HttpSync | SharedMemorySync | CollectiveSync


def weights(seed: int, model_dir: str | None = None) -> dict[str, torch.Tensor]:
    """What a trainer of this seed publishes: of a model, or four buckets for servers without one."""
    random = torch.Generator().manual_seed(seed)
    if model_dir is None:
        return {f"layer.{n}": torch.randn(BUCKET // 4, generator=random) for n in range(4)}
    model = load_model(ModelConfig(path=model_dir))
    return {
        name: value.detach() + 0.05 * torch.randn(value.shape, generator=random)
        for name, value in model.named_parameters()
    }


@cache
def digest_of(version: int, seed: int, model_dir: str | None = None) -> str:
    """What the weights of a seed are called under a number."""
    tensors = list(weights(seed, model_dir).items())
    return content_digest(version, pack(0, tensors, None).entries)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a trainer is started with."""

    url: str
    sync: Sync
    seed: int
    traps: str
    model_dir: str | None = None
    name: str = "trainer"
    after: int = 0
    """A number that is used up, whatever anybody says."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a version: the code of an error, empty if it was committed."""

    error: str = ""
    reason: str = ""


class Trainer:
    """A running one."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._answers, answers = FORKS.Pipe()
        self._process: BaseProcess = FORKS.Process(
            target=publish, args=(plan, answers), daemon=True
        )
        self._process.start()
        answers.close()
        self._version: int | None = None
        self._outcome: Outcome | None = None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    @property
    def version(self) -> int:
        """The number that it took."""
        if self._version is None:
            self._version = self._answer(LIMIT_S)
        return self._version

    @property
    def digest(self) -> str:
        """Of what it publishes."""
        return digest_of(self.version, self.plan.seed, self.plan.model_dir)

    def outcome(self) -> Outcome:
        """How it ended.

        Raises:
            EOFError: it was killed before it knew.
            TimeoutError: it hangs.
        """
        _ = self.version
        if self._outcome is None:
            self._outcome = self._answer(LIMIT_S)
        return self._outcome

    def _answer(self, timeout_s: float) -> Any:
        if not self._answers.poll(timeout_s):
            raise TimeoutError(f"the trainer of seed {self.plan.seed} did not end")
        return self._answers.recv()

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Let it close what it has opened; kill it, if it does not listen."""
        self._answers.close()
        self._process.join(GRACE_S)
        self._process.kill()
        self._process.join()


class _Engine:
    """Of a `TrainEngine`, what a publication needs."""

    def __init__(
        self, publisher: WeightPublisher, tensors: dict[str, torch.Tensor], announced: Any
    ) -> None:
        self._publisher = publisher
        self._tensors = tensors
        self._announced = announced

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        self._publisher.publish(meta.version, self._gather(meta.version))

    def _gather(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        self._announced(version)
        yield from self._tensors.items()


def publish(plan: Plan, answers: Connection) -> None:
    """Attach, publish one version, say what became of it; stay there, as trainers do, until the end."""
    torch.set_num_threads(1)
    traps = Traps(plan.traps)
    tensors = weights(plan.seed, plan.model_dir)
    num_buckets = len(list(buckets(tensors.items(), BUCKET)))
    publisher = _trapped_publisher(plan.sync, traps, num_buckets // 2)
    client = RemoteInferenceEngine(plan.url, CONNECT_S)
    client.initialize()
    version = max(client.status().head, publisher.latest() or 0, plan.after) + 1

    def announced(version: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while traps.is_set("announced") and client.weights().publishing != version:
            assert time.monotonic() < deadline, f"the gateway never heard of version {version}"
        traps.reach("announced")

    engine: Any = _Engine(publisher, tensors, announced)
    publication = Publication(engine, publisher, client)
    answers.send(version)
    try:
        client.attach(ConsumerSpec(plan.name, 1, 1 << 20, -1, version))
        publication.begin(version)
        publication.finish()
    except ServiceError as error:
        answers.send(Outcome(error.code, error.message))
    else:
        answers.send(Outcome())
    with suppress(EOFError, ConnectionResetError):
        answers.recv()
    client.destroy()
    publisher.close()


def _trapped_publisher(sync: Sync, traps: Traps, half: int) -> WeightPublisher:
    """Args:
    half: buckets after which it is reached.
    """
    if isinstance(sync, CollectiveSync):
        _trap_group(traps, half)
        return make_publisher(sync)

    class Trapped:
        def write_text(self, version: int, name: str, text: str) -> None:
            if name == MANIFEST_NAME:
                traps.reach("unmanifested")
            super().write_text(version, name, text)  # type: ignore[misc]
            if name == part_name(half - 1):
                traps.reach("half")

    class OnDisk(Trapped, LocalStore):
        pass

    class InMemory(Trapped, SharedMemoryStore):
        pass

    class OverHttp(Trapped, HttpStore):
        pass

    if isinstance(sync, DiskSync):
        return StoredPublisher(OnDisk(sync.root), sync)
    if isinstance(sync, HttpSync):
        return StoredPublisher(OverHttp(sync), sync)
    return StoredPublisher(InMemory(sync.root), sync)


def _trap_group(traps: Traps, half: int) -> None:
    """Buckets are counted as they are sent; the last part is the digest."""
    num_sent = 0
    add_part = TransferEpoch.add_bucket

    def trapped(finish: Any) -> Any:
        def finished(self: Any, watch: Any) -> None:
            nonlocal num_sent
            finish(self, watch)
            num_sent += 1
            if num_sent == half:
                traps.reach("half")

        return finished

    def told(self: TransferEpoch, part: Any) -> None:
        if part.digest is not None:
            traps.reach("unmanifested")
        add_part(self, part)

    for group in (WeightGroup, IpcGroup):
        group.finish = trapped(group.finish)  # type: ignore[method-assign]
    TransferEpoch.add_bucket = told  # type: ignore[method-assign]
