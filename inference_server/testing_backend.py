"""A backend as tests use it: started, with a store of versions, and with requests that run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse, WeightUpdateMeta
from inference_server.backends.base import GenerationBackend, StagedVersion
from weight_sync.deadline import Deadline
from weight_sync.receiver import make_receiver
from weight_sync.testing import other_weights
from weight_sync.transports.disk import make_local_publisher

T = TypeVar("T")
PROMPT = (5, 6, 7)


@dataclass
class Served:
    """A started backend on an event loop of its own, and a store of versions for it."""

    backend: GenerationBackend
    runner: asyncio.Runner
    model_path: Path
    weights: Path
    timeout_s: float
    names: Iterator[str] = field(default_factory=lambda: map("request-{}".format, range(1 << 30)))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a part of a test."""
        return self.runner.run(asyncio.wait_for(work, self.timeout_s))

    def request(
        self, max_new_tokens: int = 12, prompt: tuple[int, ...] = PROMPT, **fields: Any
    ) -> Any:
        """A request that no token ends, unless `gconfig` fields say otherwise."""
        own = {
            name: fields.pop(name) for name in ("top_logprobs", "logprob_start") if name in fields
        }
        options = {"ignore_eos": True, "max_new_tokens": max_new_tokens, **fields}
        gconfig = SamplingConfig(**options)
        return LLMRequest(rid=next(self.names), input_ids=prompt, gconfig=gconfig, **own)

    async def generate(self, *args: Any, **fields: Any) -> LLMResponse:
        """Sample one short sequence."""
        return await self.backend.generate(self.request(*args, **fields))

    def start_long(self) -> Running:
        """Start a request that fills the context, up to 2,000 tokens."""
        size = min(self.backend.limits.max_context - len(PROMPT), 2000)
        return Running(self.backend, self.request(size))

    def publish(self, factor: float = 0.9) -> WeightUpdateMeta:
        """Write other weights as the next version."""
        publisher = make_local_publisher(str(self.weights))
        try:
            number = max(self.backend.version, publisher.latest() or 0) + 1
            return publisher.publish(number, other_weights(self.model_path, factor))
        finally:
            publisher.close()

    async def stage(self, meta: WeightUpdateMeta) -> StagedVersion:
        """Let the backend read a version, on a thread."""
        receiver = make_receiver(ReceiverConfig(allow=(str(self.weights),)))
        reader = receiver.within(Deadline(self.timeout_s))
        return await asyncio.to_thread(self.backend.stage, meta, reader)

    async def until_idle(self) -> None:
        """Wait until nothing is running or queued."""
        while (load := self.backend.load()).running + load.queued:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.01)


class Running:
    """A request that runs, and the tokens that it has so far."""

    def __init__(self, backend: GenerationBackend, request: LLMRequest) -> None:
        self.rid = request.rid
        self.size = request.gconfig.max_new_tokens
        self.deltas: list[LLMDelta] = []
        self._came = asyncio.Event()
        self.task = asyncio.create_task(backend.generate(request, self._take))

    def _take(self, delta: LLMDelta) -> None:
        self.deltas.append(delta)
        self._came.set()

    async def until(self, is_there: Callable[[LLMDelta], bool] = lambda delta: True) -> None:
        """Wait for a delta; raise what the request failed with."""
        while not any(map(is_there, self.deltas)):
            self._came.clear()
            came = asyncio.ensure_future(self._came.wait())
            await asyncio.wait((came, self.task), return_when=asyncio.FIRST_COMPLETED)
            came.cancel()
            if self.task.done():
                self.task.result()
                assert any(map(is_there, self.deltas)), "the request ended without such a delta"
