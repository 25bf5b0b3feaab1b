"""The stores that pass the shared suite of ledgers, and the calls that most of its tests begin with."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.ledger.base import Ledger
from gateway.ledger.records import Capacity, Delivery, Lease
from headway.contracts.codec import decode_groups
from headway.contracts.http.rollouts import RolloutState
from tests.unit.gateway.rollout_builders import make_group, make_request

STORES = ("sqlite-file", "sqlite-memory", "redis")
SEVERAL_PROCESSES = ("sqlite-file", "redis")
ALL = 10**6


def admit(
    version: int = 0, free: int = ALL, consumer: str | None = None, budget: int | None = None
) -> Capacity:
    return Capacity(version, free, consumer, budget)


def ids(delivery: Delivery) -> list[str]:
    assert delivery.payloads is not None
    return [group.rollout_id for payload in delivery.payloads for group in decode_groups(payload)]


class RedisServer:
    """A private redis-server with an append-only file, on a socket file."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self._folder = folder
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None
        self._prefixes = (f"run{number}" for number in itertools.count())
        self.start()

    @staticmethod
    @contextmanager
    def running() -> Iterator[RedisServer]:
        """A server for the block; tests are skipped without redis."""
        if not RedisServer.is_installed():
            pytest.skip("redis-server is not installed: apt-get install redis-server")
        with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
            server = RedisServer(Path(folder))
            try:
                yield server
            finally:
                server.stop()

    @staticmethod
    def is_installed() -> bool:
        return shutil.which("redis-server") is not None

    @property
    def url(self) -> str:
        return f"unix://{self._folder}/redis.sock"

    def address(self) -> str:
        """A ledger of its own."""
        return f"{self.url}?prefix={next(self._prefixes)}"

    def start(self) -> None:
        """Returns when it answers."""
        command = ["redis-server", "--port", "0", "--unixsocket", f"{self._folder}/redis.sock"]
        command += ["--dir", str(self._folder), "--save", "", "--appendonly", "yes"]
        command += ["--appendfsync", "everysec", *self._settings]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "eady to accept connections" in line:
                return
        raise AssertionError(f"redis-server did not start: {self._process.wait()}")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.send_signal(number)
        self._process.wait(timeout=10)
        self._process.stdout.close()


@dataclass
class Play:
    """A ledger with the calls that most tests begin with."""

    ledger: Ledger
    leases: dict[str, Lease] = field(default_factory=dict)
    """The newest of each rollout."""

    async def submit(self, *rollout_ids: str, size: int = 2, **fields: object) -> None:
        requests = [make_request(name, size, **fields) for name in rollout_ids]
        await self.ledger.submit(requests, max_queued=ALL)

    async def lease(
        self,
        free: int = ALL,
        consumer: str | None = None,
        budget: int | None = None,
        version: int = 0,
    ) -> list[str]:
        leases = await self.ledger.lease(admit(version, free, consumer, budget))
        self.leases.update({lease.rollout_id: lease for lease in leases})
        return [lease.rollout_id for lease in leases]

    async def complete(self, *rollout_ids: str, size: int = 2, version: int = 0) -> None:
        for name in rollout_ids:
            await self.ledger.complete(self.leases[name], make_group(name, size, version))

    async def finish(
        self, *rollout_ids: str, size: int = 2, version: int = 0, consumer: str = "default"
    ) -> None:
        """Submit, lease and complete."""
        await self.submit(*rollout_ids, size=size, consumer=consumer)
        await self.lease(version=version)
        await self.complete(*rollout_ids, size=size, version=version)

    async def deliver(
        self,
        count: int = 1,
        delivery_id: str = "d0",
        consumer: str = "default",
        version: int = 0,
        max_staleness: int | None = None,
        learner: int | None = None,
    ) -> Delivery:
        return await self.ledger.deliver(
            delivery_id, count, consumer, version, max_staleness, learner
        )

    async def consume(self, *rollout_ids: str, step: int = 0, checkpoint_step: int = -1) -> None:
        await self.ledger.consume(rollout_ids, step, checkpoint_step)

    async def state(self, rollout_id: str) -> RolloutState | None:
        entry = await self.ledger.get(rollout_id)
        return None if entry is None else entry.state

    async def log(self, rollout_id: str) -> list[str]:
        return [event.event for event in await self.ledger.events(rollout_id)]

    async def check(self) -> None:
        """The ledger proves itself, and its running counts."""
        audit = await self.ledger.audit()
        assert (audit.lost, audit.duplicated) == (0, 0)
        assert audit.counts == await self.ledger.counts()
