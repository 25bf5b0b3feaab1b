"""Connections to services: used again, given up, and never mixed up; the service speaks as it is told."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from headway.runtime.connections import ConnectionBroken, Connections, NoResponse, NotConnected

DEADLINE_S = 10.0
OK = b"HTTP/1.1 200 OK\r\nRetry-After: 3\r\ncontent-length: 2\r\n\r\nhi"

Serve = Callable[["Peer"], Awaitable[None]]


class Peer:
    """One connection, seen from the service."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def hear(self) -> bytes:
        """The body of the next request."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        return await self._reader.readexactly(length)

    async def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()

    async def until_gone(self) -> None:
        """The client has closed the connection."""
        while await self._reader.read(4096):
            pass

    def hang_up(self) -> None:
        self._writer.close()


class Service:
    """Serves every connection as it is told, and counts them."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.num_connections = 0
        self.url = ""
        self.num_gone = asyncio.Semaphore(0)
        """Connections that the client closed."""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            await self._serve(Peer(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_gone.release()
        finally:
            writer.close()


@asynccontextmanager
async def opened(serve: Serve, **settings) -> AsyncIterator[tuple[Service, Connections]]:
    service = Service(serve)
    server = await asyncio.start_server(service.connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    service.url = f"http://{host}:{port}"
    wanted = {"max_connections": 8, "connect_timeout_s": 5.0, "keep_alive_s": 60.0, **settings}
    connections = Connections(ssl.create_default_context(), {"authorization": "Bearer x"}, **wanted)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield service, connections
    finally:
        await connections.aclose()
        server.close()
        await server.wait_closed()


@contextmanager
def breaks_off() -> Iterator[None]:
    with pytest.raises(ConnectionBroken, match="before the answer"):
        yield


async def always(peer: Peer) -> None:
    while True:
        await peer.hear()
        await peer.say(OK)


async def test_one_connection_serves_one_request_after_the_other():
    async with opened(always) as (service, connections):
        for _ in range(3):
            answer = await connections.send(f"{service.url}/v1/x?y=1", b"{}")
            assert (answer.status, answer.content) == (200, b"hi")
            assert answer.headers[b"retry-after"] == b"3"
    assert service.num_connections == 1


async def test_the_request_is_whole_and_carries_the_headers():
    heard = asyncio.get_running_loop().create_future()

    async def serve(peer: Peer) -> None:
        heard.set_result(await peer._reader.readuntil(b"}"))
        await peer.say(OK)

    async with opened(serve) as (service, connections):
        await connections.send(f"{service.url}/v1/x?y=1", b'{"a": 1}')
        assert await heard == (
            b"POST /v1/x?y=1 HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
            b'authorization: Bearer x\r\ncontent-length: 8\r\n\r\n{"a": 1}'
            % service.url.removeprefix("http://").encode()
        )


@pytest.mark.parametrize(
    "pieces",
    [
        [OK[:9], OK[9:30], OK[30:-1], OK[-1:]],
        [
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            b"1\r\nh\r\n1\r\ni\r\n",
            b"0\r\n\r\n",
        ],
        [b"HTTP/1.1 100 Continue\r\n\r\n", OK],
    ],
    ids=["in pieces", "in chunks", "after another one"],
)
async def test_an_answer_is_read_to_its_end(pieces: list[bytes]):
    async def serve(peer: Peer) -> None:
        while True:
            await peer.hear()
            await peer.say(*pieces)

    async with opened(serve) as (service, connections):
        for _ in range(2):
            answer = await connections.send(service.url, b"{}")
            assert (answer.status, answer.content) == (200, b"hi")
    assert service.num_connections == 1


async def test_a_connection_that_the_service_ends_is_not_used_again():
    async def serve(peer: Peer) -> None:
        await peer.hear()
        await peer.say(OK.replace(b"Retry-After: 3", b"connection: close"))
        await peer.until_gone()

    async with opened(serve) as (service, connections):
        for _ in range(2):
            assert (await connections.send(service.url, b"{}")).content == b"hi"
    assert service.num_connections == 2


async def test_what_nobody_asked_for_answers_nobody():
    said = asyncio.Event()

    async def serve(peer: Peer) -> None:
        body = await peer.hear()
        await peer.say(OK.replace(b"hi", body))
        await said.wait()
        await peer.say(OK)
        await peer.until_gone()
        gone.set()

    gone = asyncio.Event()
    async with opened(serve) as (service, connections):
        assert (await connections.send(service.url, b"11")).content == b"11"
        said.set()
        await gone.wait()
        assert (await connections.send(service.url, b"22")).content == b"22"
    assert service.num_connections == 2


async def test_two_answers_to_one_request_end_the_connection():
    async def serve(peer: Peer) -> None:
        body = await peer.hear()
        await peer.say(OK.replace(b"hi", body) + OK)
        await peer.until_gone()

    async with opened(serve) as (service, connections):
        for body in (b"11", b"22"):
            assert (await connections.send(service.url, body)).content == body
    assert service.num_connections == 2


async def test_nobody_there():
    async with opened(always) as (service, connections):
        pass
    with pytest.raises(NotConnected):
        await connections.send(service.url, b"{}")
    with pytest.raises(NotConnected, match="URL"):
        await connections.send("http://[::1", b"{}")
    with pytest.raises(NotConnected):
        await connections.send(f"http://{'a' * 64}.example", b"{}")


async def test_a_service_without_tls_is_no_service_with_it():
    async def serve(peer: Peer) -> None:
        await peer.say(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with opened(serve) as (service, connections):
        with pytest.raises(NotConnected, match="SSL"):
            await connections.send(service.url.replace("http", "https"), b"{}")


@pytest.mark.parametrize("said", [b"", OK[:20], OK[:-1]])
async def test_an_answer_that_breaks_off_is_none(said: bytes):
    async def serve(peer: Peer) -> None:
        await peer.hear()
        await peer.say(said)
        peer.hang_up()

    async with opened(serve) as (service, connections):
        with breaks_off():
            await connections.send(service.url, b"{}")


@pytest.mark.parametrize(
    "said", [b"SSH-2.0\r\n", b"HTTP/1.1 101 So be it\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"]
)
async def test_what_is_not_http_is_no_answer(said: bytes):
    async def serve(peer: Peer) -> None:
        await peer.hear()
        await peer.say(said)
        await peer.until_gone()

    async with opened(serve) as (service, connections):
        with pytest.raises(NoResponse):
            await connections.send(service.url, b"{}")


async def test_a_caller_that_is_cancelled_closes_its_connection():
    heard, gone = asyncio.Event(), asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.hear()
        if not heard.is_set():
            heard.set()
            await peer.until_gone()
            gone.set()
        else:
            await peer.say(OK)

    async with opened(serve, max_connections=1) as (service, connections):
        call = asyncio.create_task(connections.send(service.url, b"{}"))
        await heard.wait()
        call.cancel()
        await gone.wait()
        assert (await connections.send(service.url, b"{}")).content == b"hi"  # its place is free


async def test_no_more_connections_than_were_allowed():
    num_heard, let_go = asyncio.Semaphore(0), asyncio.Event()

    async def serve(peer: Peer) -> None:
        while True:
            await peer.hear()
            num_heard.release()
            await let_go.wait()
            await peer.say(OK)

    async with opened(serve, max_connections=2) as (service, connections):
        calls = [asyncio.create_task(connections.send(service.url, b"{}")) for _ in range(5)]
        for _ in range(2):
            await num_heard.acquire()
        let_go.set()
        assert len(await asyncio.gather(*calls)) == 5
    assert service.num_connections == 2


async def test_what_is_unused_for_long_is_closed():
    async with opened(always, keep_alive_s=0.01) as (service, connections):
        await connections.send(service.url, b"{}")
        await service.num_gone.acquire()
        assert (await connections.send(service.url, b"{}")).content == b"hi"
    assert service.num_connections == 2


async def test_closing_ends_what_is_under_way():
    heard = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.hear()
        heard.set()
        await peer.until_gone()

    async with opened(serve) as (service, connections):
        call = asyncio.create_task(connections.send(service.url, b"{}"))
        await heard.wait()
        await connections.aclose()
        with breaks_off():
            await call


async def test_what_is_asked_of_one_service_is_cut_and_no_other():
    heard = asyncio.Semaphore(0)

    async def silent(peer: Peer) -> None:
        await peer.hear()
        heard.release()
        await peer.until_gone()

    async with opened(silent) as (lost, connections), opened(silent) as (other, _):
        calls = [asyncio.create_task(connections.send(lost.url, b"{}")) for _ in range(3)]
        stays = asyncio.create_task(connections.send(other.url, b"{}"))
        for _ in range(4):
            await heard.acquire()
        connections.drop("http://[::1", "it never was")
        connections.drop(f"{lost.url}/any/path", "it was lost")
        for call in calls:
            with pytest.raises(ConnectionBroken, match="it was lost"):
                await call
        assert not stays.done()
        stays.cancel()


async def test_what_is_still_connecting_is_cut_too():
    reached = asyncio.Semaphore(0)

    async def shakes_no_hand(peer: Peer) -> None:
        reached.release()
        await peer.until_gone()

    async with opened(shakes_no_hand, connect_timeout_s=10 * DEADLINE_S) as (lost, connections):
        url = lost.url.replace("http", "https")
        calls = [asyncio.create_task(connections.send(url, b"{}")) for _ in range(2)]
        for _ in calls:
            await reached.acquire()
        connections.drop("https://127.0.0.1:1", "it was another one")
        for _ in range(2):
            connections.drop(url, "it was lost")
        for call in calls:
            with pytest.raises(NotConnected, match="it was lost"):
                await call


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (CHUNKED, b"400\r\n" + b" " * 1024 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", b" " * 1024),
        (b"HTTP/1.1 200 OK\r\n", b"x-more: " + b"x" * 1024 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\nx-more: ", b"x" * 1024),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 64),
    ],
    ids=["chunks", "a long body", "headers", "a header", "promises"],
)
async def test_an_answer_without_end_is_read_up_to_the_bound(begin: bytes, more: bytes):
    async def serve(peer: Peer) -> None:
        await peer.hear()
        await peer.say(begin)
        while True:
            await peer.say(more)

    async with opened(serve) as (service, connections):
        with pytest.raises(NoResponse, match="more than 100000 bytes"):
            await connections.send(service.url, b"{}", 100_000)
        await service.num_gone.acquire()


async def test_an_answer_that_comes_in_drops_is_not_waited_for():
    async def serve(peer: Peer) -> None:
        await peer.hear()
        await peer.say(CHUNKED)
        while True:
            await peer.say(b"1\r\n \r\n")
            await asyncio.sleep(0.01)

    async with opened(serve, answer_timeout_s=0.1) as (service, connections):
        with pytest.raises(NoResponse, match=r"did not end within 0\.1 s"):
            await connections.send(service.url, b"{}")
        await service.num_gone.acquire()


async def test_an_answer_that_has_come_in_parts_leaves_no_clock_behind():
    async def serve(peer: Peer) -> None:
        while True:
            await peer.hear()
            await peer.say(OK[:-1])
            await asyncio.sleep(0.01)
            await peer.say(OK[-1:])

    async with opened(serve, answer_timeout_s=0.3) as (service, connections):
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < began + 0.5:
            assert (await connections.send(service.url, b"{}")).content == b"hi"
        assert service.num_connections == 1
