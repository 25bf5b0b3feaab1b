"""Adapters of a fleet: on all servers or on none, and on those that come later; servers scripted."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from gateway.app.fleet import Fleet
from gateway.ledger.sqlite import SqliteLedger
from gateway.publishing.fleet_adapters import FleetAdapters
from gateway.versions import shared_lock
from gateway.versions.adapter_state import AdapterState
from gateway.versions.publication_state import PublicationState
from gateway.versions.shared_lock import SharedLock
from headway.contracts.config.gateway import FleetConfig
from headway.contracts.errors import DataError, StaleVersion, SyncError
from headway.contracts.http import paths
from headway.contracts.http.adapters import AdapterRequest, adapter_views
from headway.contracts.types import LLMRequest
from tests.unit.gateway.shared_notes import SharedNotes
from tests.unit.gateway.test_fleet import Server, opened, report, states
from tests.waiting import until

REQUEST = LLMRequest(rid="r", input_ids=(1, 2), adapter="a")


class AdapterServer(Server):
    """Loads every adapter, unless a test says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: dict[str, int] = {}
        self.paths: dict[str, str] = {}
        self.refusal: Exception | None = None
        self.may_load = asyncio.Event()
        self.may_load.set()

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_put(paths.ADAPTER, self.load)
        app.router.add_delete(paths.ADAPTER, self.unload)
        return app

    async def load(self, request: web.Request) -> web.Response:
        body = AdapterRequest.model_validate_json(await request.read())
        await self.may_load.wait()
        if isinstance(self.refusal, SyncError):
            return web.Response(
                status=self.refusal.http_status, text=self.refusal.to_body().model_dump_json()
            )
        name = request.match_info["name"]
        assert body.version is not None and body.version >= self.adapters.get(name, 0)
        self.adapters[name], self.paths[name] = body.version, body.path
        return web.Response(text=f'{{"name": "{name}", "version": {body.version}}}')

    async def unload(self, request: web.Request) -> web.Response:
        if self.refusal is not None:
            return web.Response(status=500)
        del self.adapters[request.match_info["name"]]
        return web.Response(status=204)


def heartbeat(fleet: Fleet, *servers: AdapterServer) -> None:
    for index, server in enumerate(servers):
        fleet.report(
            report(index, server, adapters=adapter_views(server.adapters), max_adapters=index + 4)
        )


async def test_all_servers_load_it_and_requests_for_it_find_one() -> None:
    first, second = AdapterServer(), AdapterServer()
    async with opened(first, second) as fleet:
        adapters = fleet.weights.adapters
        assert await adapters.load("a", "/a") == 1
        assert first.adapters == second.adapters == {"a": 1} == dict(adapters.versions)
        for _ in range(4):
            await fleet.agenerate(REQUEST)
        assert len(first.rids) + len(second.rids) == 4
        assert await adapters.load("a", "/a2") == 2
        assert (first.paths["a"], second.adapters["a"]) == ("/a2", 2)
        with pytest.raises(StaleVersion):
            await adapters.load("a", "/a", 1)
        heartbeat(fleet, first, second)
        assert adapters.max_adapters == 4, "what every server can hold"
        await adapters.unload("a")
        assert first.adapters == second.adapters == {} == dict(adapters.versions)
        with pytest.raises(DataError, match="is not loaded"):
            await adapters.unload("a")
        with pytest.raises(DataError, match="'a' is not loaded"):
            await fleet.agenerate(REQUEST)  # at once: no server will ever hold it


async def test_what_one_server_refuses_none_has() -> None:
    first, second = AdapterServer(), AdapterServer()
    async with opened(first, second) as fleet:
        adapters = fleet.weights.adapters
        await adapters.load("a", "/a")
        second.refusal = SyncError("no such directory")
        for name in ("a", "b"):
            with pytest.raises(SyncError, match="s1: no such directory"):
                await adapters.load(name, "/other")
        assert first.adapters == second.adapters == {"a": 1} == dict(adapters.versions)
        assert first.paths["a"] == "/a"


async def test_a_server_that_joins_or_restarts_loads_them_before_it_serves() -> None:
    first, second = AdapterServer(), AdapterServer()
    async with opened(first) as fleet, opened(second):
        adapters = fleet.weights.adapters
        await adapters.load("a", "/a", 7)
        heartbeat(fleet, first, second)
        assert states(fleet)["s1"] == "joining"
        await until(lambda: states(fleet)["s1"] == "ready")
        assert second.adapters == {"a": 7}
        second.adapters = {"old": 1}  # it was started again
        fleet.report(report(1, second, adapters=adapter_views(second.adapters), uptime_s=-0.0))
        for _ in range(3):
            fleet.report(report(1, second, adapters=adapter_views(second.adapters)))
        await until(lambda: second.adapters == {"a": 7})
        await until(lambda: states(fleet)["s1"] == "ready")


async def test_a_server_that_did_not_unload_is_brought_back() -> None:
    only = AdapterServer()
    async with opened(only) as fleet:
        adapters = fleet.weights.adapters
        await adapters.load("a", "/a")
        only.refusal = RuntimeError("busy")
        await adapters.unload("a")
        assert states(fleet) == {"s0": "fenced"}
        only.refusal = None
        heartbeat(fleet, only)
        await until(lambda: states(fleet) == {"s0": "ready"})
        assert only.adapters == {}


async def test_a_gateway_that_comes_back_knows_them(tmp_path) -> None:
    server = AdapterServer()
    ledger = SqliteLedger(str(tmp_path / "ledger.sqlite"))
    await ledger.open("gateway", 30.0)
    async with opened(server, state=PublicationState(ledger)) as fleet:
        await fleet.weights.adapters.load("a", "/a")
    server.url, server.adapters = "", {}
    async with opened(server, state=PublicationState(ledger)) as fleet:
        assert dict(fleet.weights.adapters.versions) == {"a": 1}
        await fleet.agenerate(REQUEST)
    await ledger.close()


async def test_gateways_of_one_ledger_load_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_lock, "LOOK_S", 0.01)
    notes, server = SharedNotes(), AdapterServer()
    async with opened(server) as one, opened(server) as other:
        gateways = [
            FleetAdapters(
                FleetConfig(), fleet.members, AdapterState(notes), SharedLock(notes, 30.0, note="a")
            )
            for fleet in (one, other)
        ]
        loads = [each.load(name, f"/{name}") for name in ("a", "b", "a") for each in gateways]
        versions = await asyncio.gather(*loads)
        assert sorted(versions) == [1, 1, 2, 2, 3, 4], "each its own"
        for each in gateways:
            await each.refresh()
            assert each.versions == server.adapters == {"a": 4, "b": 2}
            assert not each.is_changing
        server.may_load.clear()
        loading = asyncio.create_task(gateways[0].load("c", "/c"))
        await until(lambda: gateways[0].is_changing)
        await until_refreshed(gateways[1], is_changing=True)
        server.may_load.set()
        await loading
        await until_refreshed(gateways[1], is_changing=False)


async def until_refreshed(adapters: FleetAdapters, is_changing: bool) -> None:
    async with asyncio.timeout(10.0):
        while adapters.is_changing != is_changing:
            await adapters.refresh()
