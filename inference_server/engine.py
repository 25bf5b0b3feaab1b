"""One backend behind the `Generator` contract, and `LocalInferenceEngine` on top of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headway.contracts.config.server import ServerConfig
from headway.contracts.http import ServerReport, ServerStatus
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion, WeightUpdateMeta
from headway.rollout.in_process import InProcessEngine
from headway.rollout.ledger.sqlite import SqliteLedger
from headway.rollout.service import RolloutService
from headway.rollout.tokenizer import TextTokenizer
from inference_server.backends.base import GenerationBackend, OnDelta, make_backend
from inference_server.version_gate import VersionGate
from weight_sync.transports.disk import DiskReader


class LocalGenerator:
    """`Generator` over one backend and its version gate."""

    def __init__(
        self,
        backend: GenerationBackend,
        gate: VersionGate,
        name: str,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        self.backend = backend
        self.gate = gate
        self.tokenizer = tokenizer
        self._name = name

    @property
    def version(self) -> PolicyVersion:
        return self.gate.version

    @property
    def updates_in_flight(self) -> int:
        return self.gate.updates_in_flight

    def report(self, server_id: str, url: str) -> ServerReport:
        """What a heartbeat says."""
        load = self.backend.load()
        return ServerReport(
            server_id=server_id,
            url=url,
            version=self.version,
            running=load.running,
            queued=load.queued,
            generated_tokens=load.generated_tokens,
            busy_s=load.busy_s,
            uptime_s=load.uptime_s,
        )

    def statuses(self) -> list[ServerStatus]:
        report = self.report(self._name, "http://localhost")
        return [ServerStatus(**report.model_dump(), state="ready")]

    async def agenerate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        return await self.backend.generate(req, on_delta)

    async def update_weights(self, meta: WeightUpdateMeta) -> PolicyVersion:
        await self.gate.prepare(meta)
        await self.gate.commit(meta.version)
        return self.version

    async def aclose(self) -> None:
        await self.backend.aclose()


def make_generator(config: ServerConfig) -> LocalGenerator:
    """Load the model and build its gate; nothing runs yet."""
    has_tokenizer = (Path(config.model.path) / "tokenizer.json").is_file()
    tokenizer = TextTokenizer(config.model.path) if has_tokenizer else None
    backend = make_backend(config.backend, config.model, config.initial_version, tokenizer)
    reader = None if config.weights_root is None else DiskReader(config.weights_root)
    gate = VersionGate(backend, reader, config.update_policy)
    return LocalGenerator(backend, gate, "local", tokenizer)


@asynccontextmanager
async def open_service(
    config: ServerConfig, generator: LocalGenerator
) -> AsyncIterator[RolloutService]:
    """A rollout service over one backend, with a ledger in memory."""
    ledger = SqliteLedger(":memory:")
    await ledger.open()
    service = RolloutService(generator, ledger, generator.tokenizer, config.executor)
    try:
        await generator.backend.start()
        await service.start()
        yield service
    finally:
        await service.aclose()
        await generator.aclose()
        await ledger.close()


class LocalInferenceEngine(InProcessEngine):
    """`InferenceEngine` in this process: one backend, executor, ledger and version gate."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(lambda: open_service(config, make_generator(config)))
