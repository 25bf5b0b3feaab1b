"""The page of one server, read back with Prometheus's own parser."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import RequestTooLong
from headway.contracts.http.ledger import LedgerCounts
from headway.contracts.http.servers import ServerStatus
from headway.contracts.http.status import StatusResponse
from headway.contracts.types import LLMRequest
from headway.runtime.metrics import render_metrics
from inference_server.backends.base import HeldVersion
from inference_server.backends.fake import FakeBackend
from inference_server.engine import LocalGenerator
from inference_server.version_gate import VersionGate
from weight_sync.channel import StagedWeights
from weight_sync.receiver import make_receiver

DEADLINE_S = 10.0
PREFIX = "headway_generation_"


@pytest.fixture
def generator() -> LocalGenerator:
    config = FakeBackendConfig(token_latency_s=0.001, max_context=64)
    backend = FakeBackend(config, ModelConfig(path="unused"), 0)
    return LocalGenerator(backend, VersionGate(backend, make_receiver(ReceiverConfig())), "local")


def request(rid: str, max_new_tokens: int) -> LLMRequest:
    gconfig = SamplingConfig(max_new_tokens=max_new_tokens)
    return LLMRequest(rid=rid, input_ids=(1, 2, 3), gconfig=gconfig)


def samples(page: bytes) -> dict[str, float]:
    """Every sample by its name and labels."""
    families = text_string_to_metric_families(page.decode())
    return {
        s.name + "".join(f"[{value}]" for value in s.labels.values()): s.value
        for family in families
        for s in family.samples
    }


def types(page: bytes) -> dict[str, str]:
    return {f.name: f.type for f in text_string_to_metric_families(page.decode())}


async def test_requests_are_counted_by_how_they_end(generator: LocalGenerator):
    await generator.agenerate(request("whole", 5))
    with pytest.raises(RequestTooLong):
        await generator.agenerate(request("long", 1000))
    sampling = asyncio.Event()
    interrupted = asyncio.create_task(
        generator.agenerate(request("cut", 50), lambda delta: sampling.set())
    )
    await asyncio.wait_for(sampling.wait(), DEADLINE_S)
    await generator.backend.abort("cut")
    response = await asyncio.wait_for(interrupted, DEADLINE_S)
    gone = asyncio.create_task(generator.agenerate(request("gone", 50)))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    page = samples(generate_latest(generator.metrics.registry))
    outcomes = {"ok": 1, "interrupt": 1, "request_too_long": 1, "cancelled": 1}
    for outcome, count in outcomes.items():
        assert page[f"{PREFIX}requests_total[{outcome}]"] == count
    assert page[f"{PREFIX}prompt_tokens_total"] == 6
    assert page[f"{PREFIX}time_to_first_token_seconds_count"] == 2
    assert page[f"{PREFIX}request_seconds_count"] == 2
    steps = 1 + (len(response.output_tokens) > 1)
    assert page[f"{PREFIX}inter_token_seconds_count"] == steps
    assert 0.001 * 5 <= page[f"{PREFIX}request_seconds_sum"] < DEADLINE_S


async def test_the_page_shows_what_the_server_is_doing(generator: LocalGenerator):
    sampling = asyncio.Event()
    running = asyncio.create_task(
        generator.agenerate(request("a", 50), lambda delta: sampling.set())
    )
    await asyncio.wait_for(sampling.wait(), DEADLINE_S)
    page = samples(generate_latest(generator.metrics.registry))
    assert page[f"{PREFIX}in_flight_requests"] == page[f"{PREFIX}running_sequences"] == 1
    assert page[f"{PREFIX}draining"] == 0
    await generator.gate.update(
        lambda _: 1, lambda _: HeldVersion(StagedWeights(1, "0" * 64, {})), "drain"
    )
    await running
    page = samples(generate_latest(generator.metrics.registry))
    assert page["headway_weight_swap_seconds_count"] == 1
    assert page["headway_weight_swap_seconds_sum"] > 0.0
    assert page[f"{PREFIX}in_flight_requests"] == 0
    await generator.drain(0.0)
    assert samples(generate_latest(generator.metrics.registry))[f"{PREFIX}draining"] == 1


def test_one_page_holds_both_and_its_totals_are_counters(generator: LocalGenerator):
    server = ServerStatus(server_id="s", url="http://h:1", version=2, running=1, state="ready")
    status = StatusResponse(
        version=2,
        running=0,
        capacity=1,
        max_staleness=None,
        counts=LedgerCounts(ready=3),
        servers=[server],
        updates=2,
        generated_tokens=7,
    )
    page = render_metrics(status, generator.metrics.registry)
    names = [line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    metrics = samples(page)
    assert metrics["headway_weight_updates_total"] == 2
    assert metrics["headway_generated_tokens_total"] == 7
    assert metrics["headway_ledger_trajectories[ready]"] == 3
    assert metrics["headway_server_weight_version[s]"] == 2
    kinds = types(page)
    for name in ("weight_updates", "weight_updates_in_flight", "generated_tokens"):
        assert kinds[f"headway_{name}"] == "counter"
    for name in ("requests", "prompt_tokens", "prefill_tokens", "busy_seconds"):
        assert kinds[PREFIX + name] == "counter"
    for name in ("time_to_first_token_seconds", "inter_token_seconds", "request_seconds"):
        assert kinds[PREFIX + name] == "histogram"
    assert kinds["headway_weight_version"] == kinds[f"{PREFIX}kv_tokens"] == "gauge"
