import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from gateway.consumers.consumers import Publisher
from gateway.ledger.observer import LedgerObserver
from gateway.ledger.sqlite import SqliteLedger
from gateway.service.options import ServiceOptions, no_shared_services
from gateway.service.service import RolloutService
from headway.contracts.codec import decode_groups
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.http.consumers import ConsumerRequest
from headway.contracts.http.rollouts import WaitRequest
from headway.contracts.types import TrajectoryGroup, WeightUpdateMeta
from headway.text.tokenizer import TextTokenizer
from tests.unit.gateway.generators import Answer, ScriptedGenerator, at_once
from tests.unit.gateway.rollout_builders import make_request
from tests.waiting import until


@dataclass
class Bench:
    """A service on a ledger in memory, with the calls that most tests make."""

    service: RolloutService
    ledger: SqliteLedger
    generator: ScriptedGenerator
    publisher: Publisher | None = None

    async def submit(self, *names: str, size: int = 1, consumer: str = "me", **fields) -> None:
        requests = [make_request(name, size, consumer=consumer, **fields) for name in names]
        await self.service.submit(requests)

    async def wait(
        self, count: int, delivery_id: str = "d", timeout_s: float = 20.0, **fields
    ) -> list[TrajectoryGroup] | None:
        fields = {"consumer": "me", **fields}
        request = WaitRequest(delivery_id=delivery_id, count=count, timeout_s=timeout_s, **fields)
        payloads, _ = await self.service.wait(request)
        return payloads and [group for p in payloads for group in decode_groups(p)]

    async def attach(self, batch_size=2, max_staleness=0, step=-1, version=0, consumer="me") -> int:
        attachment = await self.service.attach(
            ConsumerRequest(
                consumer=consumer,
                batch_size=batch_size,
                max_staleness=max_staleness,
                step=step,
                version=version,
            )
        )
        self.publisher = Publisher(consumer, attachment.term)
        return attachment.given_back

    async def publish(self, version: int) -> int:
        """As who attached last."""
        meta = WeightUpdateMeta(version, "nowhere")
        return await self.service.updates.update(meta, None, self.publisher)

    async def until(self, condition: Callable[[], object], timeout_s: float = 5.0) -> None:
        """Let the event loop turn until a condition holds."""
        await until(condition, timeout_s)

    async def until_counts(self, timeout_s: float = 5.0, **wanted: int) -> None:
        """Until the ledger counts so many trajectories in these states."""
        async with asyncio.timeout(timeout_s):
            counts = await self.ledger.counts()
            while not wanted.items() <= counts.model_dump().items():
                counts = await self.ledger.counts()


@pytest.fixture
async def open_service(plain_tokenizer: TextTokenizer):
    """Opens a service; everything is closed after the test."""
    async with AsyncExitStack() as stack:

        async def opened(
            answer: Answer = at_once,
            ledger=None,
            version=0,
            abandon_s=5.0,
            observers: Sequence[LedgerObserver] = (),
            **settings,
        ) -> Bench:
            if ledger is None:
                ledger = SqliteLedger(":memory:")
                await ledger.open("test", settings.get("lease_s", 30.0))
                stack.push_async_callback(ledger.close)
            generator = ScriptedGenerator(answer, version)
            config = ExecutorConfig(**settings)
            around = ServiceOptions(no_shared_services(), abandon_s=abandon_s, observers=observers)
            service = RolloutService(generator, ledger, plain_tokenizer, config, around)
            await service.start()
            stack.push_async_callback(service.aclose)
            return Bench(service, ledger, generator)

        yield opened
