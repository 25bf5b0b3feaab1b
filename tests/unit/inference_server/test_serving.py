"""One server over real sockets: statuses, streams, disconnects, limits, tokens and log lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
import uvicorn

from headway.contracts.config.server import ServerConfig
from headway.contracts.errors import ConfigError, ErrorBody, ServiceError, Unauthorized
from headway.contracts.http import paths
from headway.contracts.http.generation import FlushResponse
from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse
from headway.runtime.access import Access
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.secret import authorization, is_authorized, read_token
from headway.runtime.server_calls import error_of
from inference_server.app import make_app
from inference_server.engine import LocalGenerator, make_generator
from tests.waiting import until

DEADLINE_S = 10.0
LONG = 10_000
TOKEN = "s3cret"
JSON = {"content-type": "application/json"}


@dataclass
class Served:
    """A server and a client of it."""

    url: str
    generator: LocalGenerator
    http: aiohttp.ClientSession

    async def post(self, path: str, body: object, **options) -> tuple[int, bytes]:
        async with self.http.post(self.url + path, json=body, **options) as answer:
            return answer.status, await answer.read()

    async def refused(self, path: str, body: object, **options) -> ServiceError:
        status, content = await self.post(path, body, **options)
        error = error_of(status, content, path)
        assert status == error.http_status
        return error

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition, DEADLINE_S)

    @property
    def running(self) -> int:
        return self.generator.backend.load().running


@asynccontextmanager
async def serving(token: str | None = None, latency_s=0.001, **fields) -> AsyncIterator[Served]:
    backend = {"type": "fake", "token_latency_s": latency_s}
    config = ServerConfig.model_validate({"model": {"path": "x"}, "backend": backend, **fields})
    generator = make_generator(config)
    app = make_app(config, generator, Access.of(token))
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1)
    )
    task = asyncio.create_task(server._serve())  # `serve` would take the signals from pytest
    while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
        await asyncio.sleep(0.001)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with aiohttp.ClientSession() as session:
        yield Served(f"http://127.0.0.1:{port}", generator, session)
    server.should_exit = True
    await task


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as one:
        yield one


def body(rid: str, max_new_tokens: int = 4, **fields) -> dict[str, object]:
    return {
        "rid": rid,
        "input_ids": [1, 2],
        "gconfig": {"max_new_tokens": max_new_tokens},
        **fields,
    }


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
    """`(event, data)` as they come."""
    name = ""
    async for line in answer.content:
        kind, _, value = line.decode().rstrip("\n").partition(": ")
        if kind == "event":
            name = value
        elif kind == "data":
            yield name, value


async def test_a_stream_is_its_deltas_and_then_the_response(served: Served):
    async with served.http.post(served.url + paths.GENERATE_STREAM, json=body("a", 5)) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = [part async for part in events(answer)]
    assert [name for name, _ in parts] == ["delta"] * 5 + ["response"]
    deltas = [LLMDelta.model_validate_json(data) for _, data in parts[:-1]]
    response = LLMResponse.model_validate_json(parts[-1][1])
    assert [t for delta in deltas for t in delta.output_tokens] == response.output_tokens


@pytest.mark.parametrize("path", [paths.GENERATE, paths.GENERATE_STREAM])
async def test_what_fails_before_the_first_token_has_a_status(served: Served, path: str):
    assert (await served.refused(path, body("long", 10**6))).code == "request_too_long"
    assert (await served.refused(path, body("word", input_ids=[5000]))).code == "data"
    status, content = await served.post(path, body("odd", input_ids=[]))
    assert (status, ErrorBody.model_validate_json(content).code) == (422, "invalid_request")


async def test_what_fails_within_a_stream_is_an_event_of_it():
    async with (
        serving(request_timeout_s=0.1) as served,
        served.http.post(served.url + paths.GENERATE_STREAM, json=body("a", LONG)) as answer,
    ):
        assert answer.status == 200
        parts = [part async for part in events(answer)]
        assert parts[0][0] == "delta"
        name, data = parts[-1]
        failed = ErrorBody.model_validate_json(data)
        assert (name, failed.code, failed.retryable) == ("error", "request_timeout", True)
        assert failed.request_id == answer.headers[paths.REQUEST_ID_HEADER]


async def test_a_timeout_is_a_504():
    async with serving(request_timeout_s=0.05) as served:
        error = await served.refused(paths.GENERATE, body("a", LONG))
        assert (error.code, error.http_status) == ("request_timeout", 504)
        assert served.running == 0


async def test_a_full_server_says_when_to_come_back():
    async with serving(max_in_flight=1) as served:
        running = asyncio.create_task(served.post(paths.GENERATE, body("a", LONG)))
        await served.until(lambda: served.running)
        for path in (paths.GENERATE, paths.GENERATE_STREAM):
            async with served.http.post(served.url + path, json=body("b")) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        assert (await served.refused(paths.GENERATE, body("a"))).code == "conflict"
        await served.post(paths.GENERATION_ABORT, {"rid": "a"})
        assert (await running)[0] == 200


@pytest.mark.parametrize("path", [paths.GENERATE, paths.GENERATE_STREAM])
@pytest.mark.parametrize("latency_s", [0.001, 30.0], ids=["later", "before the first token"])
async def test_a_client_that_goes_away_cancels_its_work(path: str, latency_s: float):
    async with serving(latency_s=latency_s) as served:
        work = asyncio.create_task(served.post(path, body("a", LONG)))
        await served.until(lambda: served.running)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await served.until(lambda: not served.running)
        assert served.generator.admission.in_flight == 0


async def test_an_abort_answers_with_the_tokens_so_far(served: Served):
    stopped = asyncio.create_task(served.post(paths.GENERATE, body("a", LONG)))
    going_on = asyncio.create_task(served.post(paths.GENERATE, body("b", LONG)))
    await served.until(lambda: served.generator.backend.load().generated_tokens > 8)
    assert (await served.post(paths.GENERATION_ABORT, {"rid": "a"}))[0] == 204
    response = LLMResponse.model_validate_json((await stopped)[1])
    assert response.stop_reason == "interrupt"
    assert 0 < len(response.output_tokens) < LONG
    assert served.running == 1
    assert (await served.post(paths.GENERATION_ABORT, {}))[0] == 204
    assert LLMResponse.model_validate_json((await going_on)[1]).stop_reason == "interrupt"


async def test_a_pause_holds_what_runs_until_it_is_resumed(served: Served):
    running = asyncio.create_task(served.post(paths.GENERATE, body("a", 30)))
    await served.until(lambda: served.generator.backend.load().generated_tokens)
    assert (await served.post(paths.GENERATION_PAUSE, {"mode": "in_place"}))[0] == 204
    held = asyncio.create_task(served.post(paths.GENERATE, body("b")))
    assert not (await asyncio.wait((running, held), timeout=0.1))[0]
    assert (await served.post(paths.GENERATION_RESUME, {}))[0] == 204
    for work, tokens in ((running, 30), (held, 4)):
        response = LLMResponse.model_validate_json((await work)[1])
        assert (response.stop_reason, len(response.output_tokens)) == ("length", tokens)
    assert (await served.post(paths.GENERATION_PAUSE, {"mode": "no"}))[0] == 422


async def test_a_flush_says_whether_it_happened(served: Served):
    async def flush() -> bool:
        status, content = await served.post(paths.GENERATION_FLUSH, {})
        assert status == 200
        return FlushResponse.model_validate_json(content).flushed

    assert await flush()
    running = asyncio.create_task(served.post(paths.GENERATE, body("a", LONG)))
    await served.until(lambda: served.running)
    assert not await flush()
    await served.post(paths.GENERATION_ABORT, {})
    await running


async def test_a_body_above_the_limit_is_refused_announced_or_not():
    async def in_chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 1024

    async with serving(service={"max_body_bytes": 8192}) as served:
        url = served.url + paths.GENERATE
        for data in (b" " * 65536, in_chunks()):
            async with served.http.post(url, data=data, headers=JSON) as answer:
                failed = ErrorBody.model_validate_json(await answer.read())
                assert (answer.status, failed.code) == (413, "body_too_large")
                assert failed.request_id == answer.headers[paths.REQUEST_ID_HEADER]
        assert (await served.post(paths.GENERATE, body("small")))[0] == 200


async def test_a_token_guards_all_but_the_probes():
    async with serving(token=TOKEN) as served:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}):
            url = served.url + paths.STATUS
            async with served.http.get(url, headers=given) as answer:
                failed = ErrorBody.model_validate_json(await answer.read())
                assert (answer.status, failed.code) == (401, "unauthorized")
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert TOKEN not in failed.message
        for path in (paths.METRICS, "/openapi.json"):
            async with served.http.get(served.url + path) as answer:
                assert answer.status == 401, path
        async with served.http.get(served.url + paths.HEALTH) as answer:
            assert answer.status == 200
        status, _ = await served.post(paths.GENERATE, body("a"), headers=authorization(TOKEN))
        assert status == 200


async def test_the_client_carries_its_token():
    async with serving(token=TOKEN) as served:
        client = RemoteInferenceEngine(served.url, connect_timeout_s=5.0, token=TOKEN)
        await asyncio.to_thread(client.initialize)
        req = LLMRequest.model_validate(body("a"))
        assert len((await client.agenerate(req)).output_tokens) == 4
        await client.aclose()
        client.destroy()
        stranger = RemoteInferenceEngine(served.url, connect_timeout_s=5.0)
        with pytest.raises(Unauthorized, match="no token"):
            await asyncio.to_thread(stranger.status)
        stranger.destroy()


@pytest.mark.parametrize("value", [None, "", "two words", "ümlaut"])
def test_a_token_that_is_no_token_is_refused_at_the_start(monkeypatch, value: str | None):
    monkeypatch.delenv("HEADWAY_TEST_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("HEADWAY_TEST_TOKEN", value)
    with pytest.raises(ConfigError, match="HEADWAY_TEST_TOKEN"):
        read_token("HEADWAY_TEST_TOKEN")


def test_schemes_are_compared_without_case_and_tokens_with_it():
    assert is_authorized(b"bearer s3cret", TOKEN)
    assert not is_authorized(b"Bearer S3CRET", TOKEN)
    assert not is_authorized(b"", TOKEN)


async def test_each_failed_request_leaves_one_line_with_its_ids(served: Served, caplog):
    caplog.set_level(logging.INFO, "headway.runtime.http_service")
    await served.post(paths.GENERATE, body("fine"), headers={paths.REQUEST_ID_HEADER: "q0"})
    await served.post(paths.GENERATE, body("far", 10**6), headers={paths.REQUEST_ID_HEADER: "q1"})
    await served.post(paths.GENERATE, {"rid": "bad"}, headers={paths.REQUEST_ID_HEADER: "q2"})
    lines = [r.__dict__ for r in caplog.records if r.message == "request failed"]
    seen = [(line["request_id"], line["status"], line["code"]) for line in lines]
    assert seen == [("q1", 413, "request_too_long"), ("q2", 422, "invalid_request")]
    assert (lines[0]["rid"], lines[0]["path"]) == ("far", paths.GENERATE)
    assert "exceed the context" in lines[0]["reason"]


async def test_the_metrics_page_is_the_server_s_too(served: Served):
    await served.post(paths.GENERATE, body("a"))
    async with served.http.get(served.url + paths.METRICS) as answer:
        page = (await answer.read()).decode().splitlines()
    assert 'headway_generation_requests_total{outcome="ok"} 1.0' in page
    assert "headway_generated_tokens_total 4.0" in page
    assert "headway_weight_version 0.0" in page
