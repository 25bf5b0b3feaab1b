"""What only the Redis ledger has: a server that stops, dies, forgets its scripts, or is set up badly."""

import asyncio
import logging
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvloop
from redis.asyncio import Redis

from gateway.ledger.make import make_ledger
from gateway.ledger.on_redis import calls, connection
from gateway.ledger.on_redis.address import parse_address
from gateway.ledger.redis import RedisLedger
from headway.contracts.errors import ConfigError, QueueFull, StateError
from tests.contract.page_runner import free_port
from tests.unit.gateway.ledger_suite import ALL, Play, RedisServer, admit
from tests.unit.gateway.rollout_builders import make_group, make_request


@pytest.fixture
def own_server(redis_server) -> Iterator[RedisServer]:
    """A server that a test may hurt."""
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        yield server
        server.send(signal.SIGCONT)
        server.stop(signal.SIGKILL)


@pytest.fixture
async def own_ledger(own_server) -> AsyncIterator[RedisLedger]:
    ledger = RedisLedger(own_server.address())
    await ledger.open("one", 30.0)
    yield ledger
    await ledger.close()


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(connection, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(calls, "RETRY_S", 0.3)


def test_a_server_that_takes_no_further_client_is_an_outage(redis_server, tmp_path: Path) -> None:
    """It answers with an error and resets the connection, while the client writes or before."""
    port = free_port()
    server = RedisServer(tmp_path, "--port", str(port), "--maxclients", "1")

    async def try_often() -> None:
        async with Redis.from_url(server.url) as first:
            await first.ping()
            for _ in range(60):
                with pytest.raises(StateError, match="check that Redis answers"):
                    await RedisLedger(f"redis://127.0.0.1:{port}").open("one", 30.0)

    try:
        uvloop.run(try_often())
    finally:
        server.stop()


async def test_a_server_that_comes_back_without_its_data_is_noticed(
    own_ledger, own_server, caplog: pytest.LogCaptureFixture
):
    play = Play(own_ledger)
    await play.submit("lost")
    async with Redis.from_url(own_server.url) as client:
        await client.script_flush()
    await play.submit("kept")
    assert "without its data" not in caplog.text
    async with Redis.from_url(own_server.url) as client:
        await client.flushall()
        await client.script_flush()  # as after a start without a file
    assert await own_ledger.get("lost") is None
    assert caplog.text.count("Redis came back without its data") == 1


async def test_kill_9_of_the_server_loses_nothing_that_was_acknowledged(own_ledger, own_server):
    play = Play(own_ledger)
    acknowledged: list[str] = []

    async def submit(writer: int) -> None:
        for number in range(10_000):
            await play.submit(f"w{writer}-{number}")
            acknowledged.append(f"w{writer}-{number}")
            if len(acknowledged) == 400:
                own_server.stop(signal.SIGKILL)
                before.extend(acknowledged)
                own_server.start()
            if len(acknowledged) >= 800:
                return

    before: list[str] = []
    async with asyncio.timeout(60):
        await asyncio.gather(*(submit(writer) for writer in range(8)))
    assert len(before) == 400
    leased = await play.lease()
    assert len(leased) == len(set(leased))
    assert set(leased) >= set(acknowledged)
    await play.check()


async def test_a_stopped_server_is_an_outage_and_no_value(hurried, own_server):
    ledger = RedisLedger(own_server.address())
    await ledger.open("one", 30.0)
    await Play(ledger).submit("a")
    own_server.send(signal.SIGSTOP)
    answers = await asyncio.gather(
        ledger.counts(),
        ledger.lease(admit()),
        ledger.get("a"),
        ledger.get_value("key"),
        ledger.revision(),
        ledger.deliver("d0", 1, "default", 0, None),
        return_exceptions=True,
    )
    assert [type(answer) for answer in answers] == [StateError] * 6
    assert all(answer.retryable for answer in answers)
    own_server.send(signal.SIGCONT)
    assert (await ledger.counts()).submitted == 2
    await ledger.close()


async def test_calls_whose_answers_were_lost_are_answered_again(
    own_ledger, own_server, monkeypatch
):
    """Each journey is made, then its answers are thrown away once."""
    lost = 0
    send = calls.Calls._send

    async def send_and_lose(self, client, batch):
        nonlocal lost
        fresh = [call for call in batch if call.args[0] not in seen]
        seen.update(call.args[0] for call in batch if call.args[0])
        if not [call for call in fresh if call.name and call.args[0]]:
            return await send(self, client, batch)
        lost += 1
        futures = [call.future for call in batch]
        for call in batch:
            call.future = asyncio.get_running_loop().create_future()
        await send(self, client, batch)
        for call, future in zip(batch, futures, strict=True):
            with_error = call.future.done() and call.future.exception()
            call.future = future
            assert not with_error or isinstance(with_error, StateError)
        return ConnectionError("the answer was lost")

    seen: set[object] = set()
    monkeypatch.setattr(calls.Calls, "_send", send_and_lose)
    ledger, play = own_ledger, Play(own_ledger)
    assert await ledger.submit([make_request("a"), make_request("b")], ALL) == [True, True]
    with pytest.raises(QueueFull):
        await ledger.submit([make_request("c")], 1)
    leases = await ledger.lease(admit())
    assert [(lease.rollout_id, lease.attempt) for lease in leases] == [("a", 1), ("b", 1)]
    await ledger.complete(leases[0], make_group("a"))
    await ledger.fail(leases[1], "reason")
    assert await ledger.revive(["b"]) == 1
    assert await ledger.cancel(["b"], "reason") == 1
    assert (await play.deliver()).num_ready == 1
    await play.consume("a", step=1)
    assert await ledger.give_back("default", 0) == 1
    assert await ledger.cancel_all("default", "reason") == 2
    assert await ledger.compare_and_set("key", None, "one")
    assert not await ledger.compare_and_set("key", None, "two")
    assert await ledger.compact(0.0) == 2
    await play.check()
    assert lost > 10


async def test_scripts_that_the_server_forgot_are_loaded_again(own_ledger, own_server):
    play = Play(own_ledger)
    await play.submit("a")
    async with Redis.from_url(own_server.url) as client:
        await client.script_flush()
    await play.submit("b")
    assert await play.lease() == ["a", "b"]


async def test_two_runs_on_one_server_do_not_meet(own_server):
    ledgers = [make_ledger(own_server.address()) for _ in range(2)]
    for number, ledger in enumerate(ledgers):
        await ledger.open("one", 30.0)
        await Play(ledger).submit(f"r{number}")
        await ledger.set_value("key", str(number))
    for number, ledger in enumerate(ledgers):
        assert await Play(ledger).lease() == [f"r{number}"]
        assert await ledger.get_value("key") == str(number)
        await ledger.close()


async def test_a_server_that_would_forget_rollouts_is_refused(own_server):
    async with Redis.from_url(own_server.url) as client:
        await client.config_set("maxmemory-policy", "allkeys-lru")
    ledger = RedisLedger(own_server.address())
    with pytest.raises(ConfigError, match=r"maxmemory-policy is allkeys-lru.*set noeviction"):
        await ledger.open("one", 1.0)
    await ledger.close()


async def test_a_full_server_is_an_outage_that_changes_nothing(own_ledger, own_server):
    play = Play(own_ledger)
    await play.submit("a")
    async with Redis.from_url(own_server.url) as client:
        await client.config_set("maxmemory", "1")
        with pytest.raises(StateError, match="maxmemory"):
            await play.submit("b")
        await client.config_set("maxmemory", "0")
    assert await play.lease() == ["a"]
    await play.check()


async def test_a_server_without_a_log_is_warned_of(own_server, caplog):
    async with Redis.from_url(own_server.url) as client:
        await client.config_set("appendonly", "no")
    ledger = RedisLedger(own_server.address())
    with caplog.at_level(logging.WARNING):
        await ledger.open("one", 1.0)
    assert "set appendonly yes" in caplog.text
    await ledger.close()


async def test_a_newer_layout_is_refused(own_server):
    address = own_server.address()
    async with Redis.from_url(own_server.url) as client:
        await client.set(f"{address.rpartition('=')[2]}:schema", "99")
    ledger = RedisLedger(address)
    with pytest.raises(ConfigError, match="has schema 99, this release reads 1"):
        await ledger.open("one", 1.0)
    await ledger.close()


async def test_a_server_that_is_not_there_is_an_outage_without_secrets():
    ledger = make_ledger("redis://user:hunter2@127.0.0.1:1/0")
    with pytest.raises(StateError, match=r"redis://127\.0\.0\.1:1/0") as caught:
        await ledger.open("one", 1.0)
    assert "hunter2" not in str(caught.value)
    await ledger.close()


@pytest.mark.parametrize(
    "url", ["redis://h?prefix=a%20b", "redis://h?prefix=", "redis://h?nonsense=1"]
)
async def test_a_url_that_says_nonsense_is_refused(url):
    with pytest.raises(ConfigError, match="ledger"):
        ledger = make_ledger(url)
        await ledger.open("one", 1.0)


def test_an_address_keeps_what_redis_needs():
    address = parse_address("rediss://:secret@host:7000/3?prefix={run}&ssl_cert_reqs=none")
    assert address.url == "rediss://:secret@host:7000/3?ssl_cert_reqs=none"
    assert (address.prefix, address.shown) == ("{run}", "rediss://host:7000/3?prefix={run}")
    assert parse_address("redis://host").prefix == "headway"


def test_a_ledger_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match="neither a path nor a redis://"):
        make_ledger("postgres://host/db")
