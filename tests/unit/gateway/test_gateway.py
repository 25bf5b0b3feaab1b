"""The gateway for the operator of its weights: HTTP, metrics and commands."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import tempfile
from pathlib import Path

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from gateway.app.opening import open_gateway
from gateway.app.routes import fleet_routes
from gateway.service.app import create_app
from headway.contracts.config.gateway import ExecutorConfig, GatewayConfig
from headway.contracts.errors import Conflict, NotFound, ServiceError, StoreUnusable
from headway.contracts.types import WeightUpdateMeta
from headway.launch import cli
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.unit.gateway.ledger_suite import RedisServer
from tests.unit.gateway.weight_server import WeightServer
from tests.waiting import until


@pytest.fixture
async def url(played) -> str:
    return played[0]


@pytest.fixture
async def played(tokenizer_dir: Path):
    """Where it is, its fleet and the server: a gateway with one server, at version 2 of 2."""
    config = GatewayConfig(
        tokenizer=str(tokenizer_dir), ledger=":memory:", executor=ExecutorConfig()
    )
    metrics = CollectorRegistry()
    app = create_app(
        "gateway",
        lambda: open_gateway(config, None, metrics),
        1 << 20,
        fleet_routes,
        metrics=metrics,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    generation = WeightServer("s0")
    await generation.start()
    app.state.service.generator.report(generation.report())
    for version in (1, 2):
        await app.state.service.updates.update(WeightUpdateMeta(version, f"/v{version}"))
    yield "http://{}:{}".format(*listener.getsockname()), app.state.service.generator, generation
    server.should_exit = True
    await serving
    await generation.stop()
    listener.close()


async def test_a_gateway_that_finds_no_store_waits_for_it(tokenizer_dir: Path, caplog):
    if not RedisServer.is_installed():
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        redis = RedisServer(Path(folder))
        redis.stop()
        config = GatewayConfig(tokenizer=str(tokenizer_dir), ledger=redis.address())

        async def opened() -> int:
            async with open_gateway(config) as service:
                return (await service.status()).version

        opening = asyncio.create_task(opened())
        await until(lambda: "waiting for the store" in caplog.text)
        redis.start()
        assert await opening == 0
        redis.stop()


@pytest.mark.parametrize("kind", ["directory", "no database", "below a file"])
async def test_a_ledger_that_cannot_be_opened_is_not_waited_for(
    tokenizer_dir: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "ledger.sqlite"
    if kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"not a database, but long enough to be read" * 50)
    ledger = path / "inner" if kind == "below a file" else path
    with pytest.raises(ServiceError, match=str(ledger)) as caught:
        async with open_gateway(GatewayConfig(tokenizer=str(tokenizer_dir), ledger=str(ledger))):
            pytest.fail("it opened")
    assert not caught.value.retryable
    assert "waiting for the store" not in caplog.text


async def test_a_redis_that_wants_a_password_is_not_waited_for(tokenizer_dir: Path):
    if not RedisServer.is_installed():
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        redis = RedisServer(Path(folder))
        async with Redis.from_url(redis.url) as client:
            await client.config_set("requirepass", "secret")
        with pytest.raises(StoreUnusable, match="mend user, password"):
            async with open_gateway(
                GatewayConfig(tokenizer=str(tokenizer_dir), ledger=redis.address())
            ):
                pytest.fail("it opened")
        redis.stop()


async def run(*argv: str) -> None:
    await asyncio.to_thread(cli.main, argv)


async def test_commands_pin_release_and_roll_back(url: str, capsys: pytest.CaptureFixture[str]):
    await run("rollback", url, "1")
    await run("pin", url)
    await run("pin", url, "2")
    await run("pin", url, "--release")
    assert capsys.readouterr().out.splitlines() == [
        "version 1 serves, not pinned; the newest published is 2",
        "version 1 serves, pinned; the newest published is 2",
        "version 2 serves, pinned; the newest published is 2",
        "version 2 serves, not pinned; the newest published is 2",
    ]


async def test_the_status_shows_what_is_published(url: str, capsys: pytest.CaptureFixture[str]):
    await run("status", url, "--json")
    pages = capsys.readouterr().out.replace("\n}\n{", "\n}\0{").split("\0")
    status, _, weights = (json.loads(page) for page in pages)
    assert (status["version"], status["head"]) == (2, 2)
    assert [record["version"] for record in weights["kept"]] == [1, 2]
    assert (weights["pinned"], weights["publishing"], weights["head"]) == (None, None, 2)


async def test_refusals_come_back_as_they_are(url: str):
    client = RemoteInferenceEngine(url)
    with pytest.raises(NotFound, match=r"version 9 is not kept; kept are \[1, 2\]"):
        await asyncio.to_thread(client.rollback, 9)
    await asyncio.to_thread(client.pin, 1)
    with pytest.raises(Conflict, match="version 1 is pinned"):
        await asyncio.to_thread(client.rollback, 2)
    client.destroy()


async def test_the_bound_on_what_is_in_play_is_told_as_it_moves(played):
    url, fleet, generation = played
    most = ExecutorConfig().max_concurrent

    def limit() -> float:
        page = httpx.get(f"{url}/metrics").text
        return float(page.partition("\nheadway_fleet_limit_trajectories ")[2].partition("\n")[0])

    assert await asyncio.to_thread(limit) == most
    async with asyncio.timeout(20.0):
        for preemptions in itertools.count(1):
            fleet.report(generation.report().model_copy(update={"preemptions": preemptions}))
            if await asyncio.to_thread(limit) < most:
                break


async def test_publications_are_measured(url: str):
    page = (await asyncio.to_thread(httpx.get, f"{url}/metrics")).text
    assert 'headway_weight_publications_total{outcome="committed"} 2.0' in page
    assert "headway_weight_commit_seconds_count 2.0" in page
    assert "headway_weight_head_version 2.0" in page
    assert "headway_weight_publishing 0.0" in page
