"""The dashboard's routes, and the observers that its figures come from."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest

from gateway.app.main import make_gateway
from gateway.app.rollout_metrics import RolloutMetrics
from gateway.dashboard.history import LENGTH, ServiceHistory
from gateway.dashboard.routes import STATIC
from gateway.ledger.observer import Attempt
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.http import paths
from headway.contracts.http.ledger import LedgerCounts
from headway.contracts.http.status import DashboardResponse, StatusResponse
from headway.contracts.types import TrajectoryGroup
from headway.runtime.access import Access
from tests.unit.gateway.rollout_builders import make_request, make_trajectory
from tests.unit.gateway.weight_server import WeightServer
from tests.waiting import until

SECRET = "a-token-of-the-test"
FILES = sorted(STATIC.iterdir())
FORBIDDEN = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage"
)


@asynccontextmanager
async def opened(
    config: GatewayConfig, token: str | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway under a real server, with one generation server; a client of it."""
    app = make_gateway(config, access=Access.of(token))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    generation = WeightServer("s0")
    await generation.start()
    try:
        await until(lambda: server.started)
        app.state.service.generator.report(generation.report())
        url = "http://{}:{}".format(*listener.getsockname())
        async with httpx.AsyncClient(base_url=url) as client:
            yield client
    finally:
        server.should_exit = True
        await serving
        await generation.stop()
        listener.close()


@pytest.fixture
def config(tokenizer_dir: Path) -> GatewayConfig:
    return GatewayConfig(tokenizer=str(tokenizer_dir), ledger=":memory:")


def status(**fields) -> StatusResponse:
    fields = {"version": 1, "running": 0, "capacity": 1, "max_staleness": None, **fields}
    return StatusResponse(counts=LedgerCounts(), **fields)


async def test_the_page_is_open_and_its_data_are_not(config: GatewayConfig):
    async with opened(config, SECRET) as client:
        page = await client.get(paths.UI)
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        for file in FILES:
            assert (await client.get(f"{paths.UI}/{file.name}")).content == file.read_bytes()
        refused = await client.get(paths.DASHBOARD)
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
        known = {"authorization": f"Bearer {SECRET}"}
        assert (await client.get(paths.DASHBOARD, headers=known)).status_code == 200


async def test_pages_may_load_from_here_only_and_be_framed_by_nobody(config: GatewayConfig):
    async with opened(config) as client:
        for path in (paths.UI, f"{paths.UI}/main.js"):
            headers = (await client.get(path)).headers
            assert headers["content-security-policy"] == (
                "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
                "object-src 'none'"
            )
            assert headers["x-content-type-options"] == "nosniff"


async def test_nothing_else_is_served_as_a_file(config: GatewayConfig):
    async with opened(config) as client:
        for name in ("nothing.js", "..%2froutes.py", "%2e%2e", "routes.py", "a%00b"):
            answer = await client.get(f"{paths.UI}/{name}")
            assert answer.status_code == 404, name


async def test_a_gateway_may_do_without(config: GatewayConfig):
    async with opened(config.model_copy(update={"dashboard": False})) as client:
        assert (await client.get(paths.UI)).status_code == 404
        assert (await client.get(paths.DASHBOARD)).status_code == 404
        assert "headway_fleet_servers" in (await client.get(paths.METRICS)).text


async def test_the_summary_tells_fleet_versions_scale_and_history(config: GatewayConfig):
    async with opened(config) as client:
        told = DashboardResponse.model_validate_json((await client.get(paths.DASHBOARD)).content)
        assert [server.server_id for server in told.status.servers] == ["s0"]
        assert told.weights.head == told.status.head
        assert told.scale.wanted == 1
        assert told.sessions_open == 0
        last = told.history[-1]
        assert (last.queued, last.num_rewards, last.mean_reward) == (0, 0, None)
        later = (await client.get(paths.DASHBOARD, params={"after": last.at})).json()
        assert all(point["at"] > last.at for point in later["history"])
        refused = await client.get(paths.DASHBOARD, params={"after": "nan"})
        assert refused.status_code == 422


@pytest.mark.parametrize("file", FILES, ids=[file.name for file in FILES])
def test_static_files_hold_nothing_inline_nothing_foreign_and_never_parse_markup(file: Path):
    text = file.read_text()
    addresses = set(re.findall(r"https?://[^\s\"'`]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not addresses
    assert not re.search(FORBIDDEN, text)
    if file.suffix == ".html":
        assert not re.search(r"<script(?![^>]* src=)|<style| style=| on[a-z]+=", text)


def test_metrics_tell_durations_rewards_verdicts_lengths_and_staleness():
    registry = CollectorRegistry()
    metrics = RolloutMetrics(registry)
    group = TrajectoryGroup(
        "a", "g", (make_trajectory(reward=1.0), make_trajectory(versions=(0,) * 20, reward=0.5))
    )
    metrics.ended(Attempt(make_request("a"), "ready", 2.0, group))
    metrics.ended(Attempt(make_request("b"), "failed", 0.5))
    metrics.delivered(2, 4)
    metrics.expired(3)
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'headway_rollout_attempt_seconds_sum{outcome="ready",workflow="single_turn"} 2.0',
        'headway_rollout_attempt_seconds_count{outcome="failed",workflow="single_turn"} 1.0',
        'headway_rollout_reward_sum{reward="exact"} 1.5',
        'headway_rollout_reward_count{reward="exact"} 2.0',
        'headway_rollout_verdicts_total{verdict="scored"} 2.0',
        'headway_rollout_sampled_tokens_bucket{le="16.0"} 1.0',
        'headway_rollout_staleness_versions_bucket{le="1.0"} 0.0',
        'headway_rollout_staleness_versions_bucket{le="2.0"} 4.0',
        "headway_rollout_expirations_total 3.0",
    ):
        assert line in lines


def test_history_keeps_means_between_points_and_forgets_the_oldest():
    history = ServiceHistory()
    rewards = (0.0, 1.0, 0.5)
    group = TrajectoryGroup("a", "g", tuple(make_trajectory(reward=reward) for reward in rewards))
    history.ended(Attempt(make_request("a"), "ready", 1.0, group))
    history.delivered(1, 2)
    history.delivered(1, 4)
    for second in range(LENGTH + 1):
        history.note(100.0 + second, status(generated_tokens=second))
        if second == 0:
            (first,) = history.since(0.0)
            assert (first.num_rewards, first.mean_reward) == (3, 0.5)
            assert (first.min_reward, first.max_reward) == (0.0, 1.0)
            assert first.staleness == {1: 6}
    points = history.since(0.0)
    assert (len(points), points[0].at, points[-1].at) == (LENGTH, 101.0, 100.0 + LENGTH)
    assert (points[0].num_rewards, points[0].staleness) == (0, {})
    assert [point.at for point in history.since(99.0 + LENGTH)] == [100.0 + LENGTH]
