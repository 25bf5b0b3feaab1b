"""Who may publish, and what becomes of a publication whose publisher goes away."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvicorn

from gateway.consumers.consumers import Publisher
from gateway.service.app import create_app
from headway.contracts.errors import Conflict, Fenced, SyncError
from headway.contracts.http.paths import WEIGHTS
from headway.contracts.types import ConsumerSpec, WeightUpdateMeta
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.unit.gateway.conftest import Bench

V1 = WeightUpdateMeta(1, "nowhere")


@pytest.fixture
async def slow(open_service) -> Bench:
    """Its publications wait for `generator.publishing`; abandoned ones end soon."""
    bench = await open_service(abandon_s=0.1)
    bench.generator.publishing = asyncio.Event()
    return bench


async def ends(task: asyncio.Task) -> None:
    await asyncio.wait({task}, timeout=10)
    assert task.done()


async def test_anybody_publishes_while_no_consumer_is_attached(open_service):
    bench = await open_service()
    assert await bench.service.updates.update(V1) == 1


async def test_only_the_attached_consumer_publishes(open_service):
    bench = await open_service()
    await bench.attach()
    with pytest.raises(Conflict, match="consumer 'me' is attached; only it publishes weights"):
        await bench.service.updates.update(V1)
    with pytest.raises(Conflict, match="'me' is attached, and not 'you'"):
        await bench.service.updates.update(V1, None, Publisher("you", 1))
    with pytest.raises(Conflict):
        await bench.service.updates.cancel(1, "why")
    assert await bench.publish(1) == 1


async def test_an_older_incarnation_is_fenced_also_after_restarts(open_service):
    bench = await open_service()
    await bench.attach()
    old = bench.publisher
    await bench.service.detach("me")
    with pytest.raises(Fenced, match="'me' is not attached any more"):
        await bench.service.updates.update(V1, None, old)
    await bench.service.aclose()
    bench = await open_service(ledger=bench.ledger)
    await bench.attach()
    assert bench.publisher.term == old.term + 1
    again = await open_service(ledger=bench.ledger)
    for service in (bench.service, again.service):
        with pytest.raises(Fenced, match="term 1 was followed by 2"):
            await service.updates.update(V1, None, old)
    assert await again.service.updates.update(V1, None, bench.publisher) == 1


async def test_an_older_incarnation_is_given_nothing_and_consumes_nothing(open_service):
    bench = await open_service()
    await bench.attach()
    old = bench.publisher.term
    await bench.submit("r0")
    assert await bench.wait(1, "d1", term=old)
    assert await bench.attach() == 1
    for call in (
        bench.wait(1, "d1", term=old),
        bench.wait(1, "d2", term=old),
        bench.service.consumed(["r0"], 0, -1, old),
    ):
        with pytest.raises(Fenced, match=f"term {old} was followed by {old + 1}; end the older"):
            await call
    new = bench.publisher.term
    assert await bench.wait(1, "d3", term=new)
    with pytest.raises(Fenced):
        await bench.service.consumed(["r0"], 0, -1, old)
    await bench.service.consumed(["r0"], 0, -1, new)


async def test_a_new_incarnation_ends_what_the_old_one_publishes(slow: Bench):
    await slow.attach()
    old = asyncio.create_task(slow.publish(1))
    await slow.until(lambda: slow.generator.begun)
    await slow.attach()
    with pytest.raises(Fenced, match="'me' has attached again"):
        await old
    assert slow.generator.given_up == [1]
    slow.generator.publishing.set()
    assert await slow.publish(1) == 1


async def test_a_repeat_joins_the_publication_that_is_under_way(slow: Bench):
    repeats = [asyncio.create_task(slow.service.updates.update(V1)) for _ in range(3)]
    await asyncio.sleep(0)
    slow.generator.publishing.set()
    assert await asyncio.gather(*repeats) == [1, 1, 1]
    assert (await slow.service.status()).updates == 1


async def test_another_version_waits_for_the_one_that_is_under_way(slow: Bench):
    first = asyncio.create_task(slow.service.updates.update(V1))
    await asyncio.sleep(0)
    second = asyncio.create_task(slow.service.updates.update(WeightUpdateMeta(2, "nowhere")))
    await asyncio.sleep(0)
    slow.generator.publishing.set()
    assert (await first, await second) == (1, 2)


async def test_a_publisher_gives_a_version_up(slow: Bench):
    await slow.attach()
    publication = asyncio.create_task(slow.publish(1))
    await slow.until(lambda: slow.generator.begun)
    assert await slow.service.updates.cancel(1, "no space left", slow.publisher) == 0
    with pytest.raises(SyncError, match="version 1 was given up: no space left"):
        await publication
    assert slow.generator.given_up == [1]
    assert await slow.service.updates.cancel(1, "no space left", slow.publisher) == 0


async def test_what_nobody_waits_for_is_given_up_after_a_moment(slow: Bench):
    publication = asyncio.create_task(slow.service.updates.update(V1))
    await slow.until(lambda: slow.generator.begun)
    publication.cancel()
    await slow.until(lambda: slow.generator.given_up == [1])


async def test_a_repeat_within_that_moment_saves_it(open_service):
    bench = await open_service(abandon_s=60.0)
    bench.generator.publishing = asyncio.Event()
    lost = asyncio.create_task(bench.service.updates.update(V1))
    await bench.until(lambda: bench.generator.begun)
    lost.cancel()
    await ends(lost)
    repeat = asyncio.create_task(bench.service.updates.update(V1))
    await asyncio.sleep(0)
    bench.generator.publishing.set()
    assert await repeat == 1
    assert bench.generator.given_up == []


async def test_a_version_counts_although_its_publisher_is_gone(open_service):
    bench = await open_service(abandon_s=60.0)
    bench.generator.publishing = asyncio.Event()
    await bench.attach(batch_size=2)
    lost = asyncio.create_task(bench.publish(1))
    await bench.until(lambda: bench.generator.begun)
    lost.cancel()
    bench.generator.publishing.set()
    await bench.until(lambda: bench.generator.version == 1)
    assert (await bench.service.status()).capacity == 4


@pytest.fixture
async def url(slow: Bench):
    """The service behind real HTTP."""

    class Opened:
        async def __aenter__(self):
            return slow.service

        async def __aexit__(self, *_):
            pass

    app = create_app("test", Opened, 1 << 20)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await slow.until(lambda: server.started)
    yield "http://{}:{}".format(*listener.getsockname())
    server.should_exit = True
    await serving
    listener.close()


async def test_a_publisher_whose_connection_breaks_leaves_nothing_behind(slow: Bench, url: str):
    host, port = url.removeprefix("http://").split(":")
    body = b'{"version": 1, "path": "nowhere"}'
    head = f"POST {WEIGHTS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    await slow.until(lambda: slow.generator.begun)
    writer.transport.abort()
    await slow.until(lambda: slow.generator.given_up == [1])


async def test_a_remote_engine_publishes_as_the_consumer_it_attached(slow: Bench, url: str):
    old, new = RemoteInferenceEngine(url), RemoteInferenceEngine(url)
    spec = ConsumerSpec("me", batch_size=2, max_staleness=0, step=-1, version=0)
    await asyncio.to_thread(old.attach, spec)
    future = old.update_weights(V1)
    await slow.until(lambda: slow.generator.begun)
    assert await asyncio.to_thread(old.cancel_update, 1, "x" * 9999) == 0
    with pytest.raises(SyncError, match="was given up: xxx"):
        await asyncio.wrap_future(future)
    await asyncio.to_thread(new.attach, spec)
    with pytest.raises(Fenced, match="end the older process"):
        await asyncio.wrap_future(old.update_weights(V1))
    slow.generator.publishing.set()
    assert await asyncio.wrap_future(new.update_weights(V1)) == 1
    await asyncio.to_thread(new.detach)
    assert await asyncio.wrap_future(new.update_weights(WeightUpdateMeta(2, "nowhere"))) == 2
    for engine in (old, new):
        engine.destroy()
