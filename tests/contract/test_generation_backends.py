"""Our own generation backends pass the suite that we give to authors of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig, FakeBackendConfig
from headway.runtime.tasks import cancel_and_wait
from inference_server.backends.base import GenerationBackend, make_backend
from inference_server.testing import FIRST_VERSION, GenerationBackendContract
from tests.unit.inference_server.test_vllm_backend import serving as vllm_serving
from tests.unit.inference_server.vllm_stand_in import VLLMStandIn


class TestFake(GenerationBackendContract):
    def make_backend(self, model: ModelConfig, version: int):
        config = FakeBackendConfig(token_latency_s=0.001, vocab_size=61)
        return make_backend(config, model, version, None)


class TestEmbeddedTorch(GenerationBackendContract):
    def make_backend(self, model: ModelConfig, version: int):
        config = EmbeddedTorchConfig(kv_cache_bytes=1 << 25, num_threads=1)
        return make_backend(config, model, version, None)


def test_the_suite_says_what_to_define():
    with pytest.raises(NotImplementedError, match="defines make_backend"):
        GenerationBackendContract().make_backend(ModelConfig(path="none"), 0)


class TestVLLM(GenerationBackendContract):
    """Against a server with vLLM's shapes, which samples a token per millisecond."""

    @asynccontextmanager
    async def serving(self, model_path: Path) -> AsyncIterator[GenerationBackend]:
        async with vllm_serving(model_path, version=FIRST_VERSION) as (backend, engine):
            pacing = asyncio.create_task(pace(engine))
            yield backend
            await cancel_and_wait([pacing])


async def pace(engine: VLLMStandIn) -> None:
    while True:
        engine.let(1 + max((len(one.tokens) for one in engine.running), default=0))
        await asyncio.sleep(0.001)
