"""Detaching a consumer ends all of its rollouts, also those that were about to be claimed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gateway.ledger.sqlite import SqliteLedger
from gateway.service.service import RolloutService
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.http.consumers import ConsumerRequest
from headway.contracts.types import Prompt, RolloutRequest
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.fake import FakeBackend
from inference_server.engine import LocalGenerator
from inference_server.version_gate import VersionGate
from weight_sync.receiver import make_receiver

NUM_ROLLOUTS = 40


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    Tokenizer(WordLevel({"w0": 0}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    return TextTokenizer(str(tmp_path))


@pytest.mark.parametrize("num_turns", range(12))
async def test_nothing_is_claimed_while_a_consumer_detaches(
    tokenizer: TextTokenizer, num_turns: int
):
    backend = FakeBackend(FakeBackendConfig(token_latency_s=0.001), ModelConfig(path="none"), 0)
    ledger = SqliteLedger(":memory:")
    await ledger.open("test", 30.0)
    generator = LocalGenerator(
        backend, VersionGate(backend, make_receiver(ReceiverConfig())), "local"
    )
    service = RolloutService(generator, ledger, tokenizer, ExecutorConfig(max_concurrent=4))
    await service.start()
    await service.attach(
        ConsumerRequest(consumer="me", batch_size=64, max_staleness=0, step=-1, version=0)
    )
    await service.submit(
        [
            RolloutRequest(
                rollout_id=f"r{number}",
                consumer="me",
                prompt=Prompt(group_id=f"g{number}", text="w0"),
                reward=ComponentConfig(name="exact"),
                gconfig=SamplingConfig(max_new_tokens=1000),
            )
            for number in range(NUM_ROLLOUTS)
        ]
    )
    for _ in range(num_turns):  # the claim loop is at another point each time
        await asyncio.sleep(0)
    await service.detach("me")
    counts = await ledger.counts()
    await service.aclose()
    await ledger.close()
    assert counts.cancelled == NUM_ROLLOUTS, counts
