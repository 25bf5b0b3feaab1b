"""What a connection gets away with: slow, huge, malformed, too many."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from headway.contracts.config.gateway import ServiceConfig
from headway.contracts.errors import ErrorBody
from headway.contracts.http.paths import HEALTH
from headway.runtime.limits import MAX_FIELDS, MAX_HEAD_BYTES, MAX_PIPELINED
from tests.unit.runtime.served import ECHO, echo_app, served
from tests.waiting import eventually

DEADLINE_S = 20.0
HEAD = b"GET " + HEALTH.encode() + b" HTTP/1.1\r\nhost: x\r\n"
POST = b"POST " + ECHO.encode() + b" HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(ServiceConfig(header_timeout_s=0.5, max_connections=64)) as port:
        yield port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def until_closed(peer: socket.socket) -> bytes:
    """Everything that comes before the other side closes."""
    answer = b""
    try:
        while piece := peer.recv(65536):
            answer += piece
    except ConnectionResetError:
        pass
    return answer


def answer_of(peer: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer with a length; what follows it stays unread."""
    head, body = b"", b""
    while not head.endswith(b"\r\n\r\n"):
        piece = peer.recv(1)
        assert piece, head
        head += piece
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
    while len(body) < length:
        piece = peer.recv(length - len(body))
        assert piece, body
        body += piece
    return int(head.split()[1]), body


ENDED = threading.Event()


def slow_app() -> FastAPI:
    """`/slow` never answers, `/endless` for ever."""
    app = echo_app()

    @app.get("/slow")
    async def slow(request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    @app.get("/endless")
    async def endless() -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            ENDED.clear()
            try:
                while True:
                    await asyncio.sleep(0)
                    yield b"x" * (1 << 16)
            finally:
                ENDED.set()

        return StreamingResponse(pieces())

    return app


def refusal(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), ErrorBody.model_validate_json(body).code


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"\r\n",
        b"G",
        HEAD,
        HEAD + b"x: ",
        POST + b"content-length: 100\r\n\r\n",
        POST + b"content-length: 100\r\n\r\nhalf",
        POST + b"transfer-encoding: chunked\r\n\r\n5\r\nab",
    ],
    ids=["nothing", "blank", "letter", "line", "field", "no body", "half a body", "half a chunk"],
)
def test_a_request_that_does_not_arrive_is_given_up(port: int, begun: bytes):
    with connect(port) as peer:
        peer.sendall(begun)
        assert until_closed(peer) == b""


def test_one_byte_at_a_time_does_not_hold_a_connection(port: int):
    def drip(peer: socket.socket, ended: threading.Event) -> None:
        try:
            while not ended.wait(0.05):
                peer.sendall(b"x")
        except OSError:
            return

    for begun in (HEAD, POST + b"content-length: 1000000\r\n\r\n"):
        ended = threading.Event()
        with connect(port) as peer:
            peer.sendall(begun)
            writer = threading.Thread(target=drip, args=(peer, ended))
            writer.start()
            assert until_closed(peer) == b""
            ended.set()
            writer.join()


def test_blank_lines_do_not_hold_a_connection_that_served(port: int):
    with connect(port) as peer:
        peer.sendall(HEAD + b"\r\n")
        assert answer_of(peer)[0] == 200
        peer.sendall(b"\r\n")
        assert until_closed(peer) == b""


def test_a_second_request_has_its_own_time(port: int):
    with connect(port) as peer:
        for _ in range(3):
            peer.sendall(HEAD)
            peer.sendall(b"\r\n")
            assert answer_of(peer)[0] == 200
        peer.sendall(HEAD)
        assert until_closed(peer) == b""


def test_a_body_that_keeps_coming_may_take_longer(port: int):
    """Half a MiB earns eight seconds, so what comes after the first half second is still taken."""
    size = 1 << 19
    with connect(port) as peer:
        peer.sendall(POST + f"content-length: {size + 1}\r\n\r\n".encode() + b"x" * size)
        peer.settimeout(1.0)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        peer.settimeout(DEADLINE_S)
        peer.sendall(b"x")
        assert answer_of(peer) == (200, str(size + 1).encode())


def test_pipelined_requests_are_answered_in_order(port: int):
    with connect(port) as peer:
        bodies = [b"a" * size for size in (1, 22, 333)]
        peer.sendall(
            b"".join(POST + f"content-length: {len(b)}\r\n\r\n".encode() + b for b in bodies)
        )
        assert [answer_of(peer) for _ in bodies] == [(200, b"1"), (200, b"22"), (200, b"333")]


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"x: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n",
        b"GET /" + b"a" * (MAX_HEAD_BYTES + 1) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        HEAD + b"".join(b"x%d: a\r\n" % n for n in range(MAX_FIELDS + 1)) + b"\r\n",
        HEAD + b"x: " + b"a" * 10 * MAX_HEAD_BYTES,
        HEAD + (b"a" * 10 * MAX_HEAD_BYTES),
    ],
    ids=["value", "path", "fields", "value without an end", "name without an end"],
)
def test_a_head_is_bounded(port: int, request_bytes: bytes):
    with connect(port) as peer:
        try:
            for start in range(0, len(request_bytes), 8192):
                peer.sendall(request_bytes[start : start + 8192])
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = until_closed(peer)
        # A reset may overtake the answer of who still sends.
        assert not answer or refusal(answer) == (431, "invalid_request")


def test_a_large_head_below_the_bound_is_read(port: int):
    with connect(port) as peer:
        peer.sendall(HEAD + b"x: " + b"a" * (MAX_HEAD_BYTES - 1024) + b"\r\n\r\n")
        assert answer_of(peer)[0] == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GARBAGE\r\n\r\n",
        POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"content-length: 4\r\ncontent-length: 5\r\n\r\nabcd",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"content-length: 99999999999999999999999\r\n\r\n",
        POST + b"content-length: 1e3\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
        POST + b"transfer-encoding: chunked, identity\r\n\r\nabcd",
        HEAD + b"bad field: x\r\n\r\n",
        HEAD + b"x: a\x00b\r\n\r\n",
        HEAD + b"x: a\rb\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=[
        "TLS",
        "garbage",
        "two framings",
        "two lengths",
        "negative length",
        "huge length",
        "length in words",
        "bad chunk",
        "unknown coding",
        "blank in a name",
        "NUL",
        "bare CR",
        "bytes in a path",
    ],
)
def test_what_cannot_be_read_in_one_way_only_is_refused(port: int, request_bytes: bytes):
    with connect(port) as peer:
        peer.sendall(request_bytes)
        assert refusal(until_closed(peer)) == (400, "invalid_request")


def test_an_upgrade_is_answered_as_a_plain_request(port: int):
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    with connect(port) as peer:
        peer.sendall(HEAD + upgrade + b"sec-websocket-key: eHh4eHh4eHh4eHh4eHh4eA==\r\n\r\n")
        assert answer_of(peer)[0] in (200, 400)


def test_a_connection_too_many_is_told_so_and_the_others_go_on():
    config = ServiceConfig(header_timeout_s=5.0, max_connections=4)
    with served(config) as port, ExitStack() as stack:
        first = [stack.enter_context(connect(port)) for _ in range(4)]
        for peer in first:
            peer.sendall(HEAD + b"\r\n")
            assert answer_of(peer)[0] == 200
        late = stack.enter_context(connect(port))
        late.sendall(HEAD + b"\r\n")
        answer = until_closed(late)
        assert refusal(answer) == (503, "queue_full")
        assert b"retry-after: 1" in answer.lower()
        for peer in first:
            peer.sendall(HEAD + b"\r\n")
            assert answer_of(peer)[0] == 200
        first[0].close()
        again = stack.enter_context(connect(port))
        # Its place is free once the server has seen the other one go.
        for _ in range(100):
            again.sendall(HEAD + b"\r\n")
            if answer_of(again)[0] == 200:
                break
            again = stack.enter_context(connect(port))
        else:
            pytest.fail("the place of a closed connection is not given away")


def connect_from(address: str, port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), DEADLINE_S, (address, 0))


def test_idle_connections_of_one_client_leave_room_for_others():
    config = ServiceConfig(header_timeout_s=30.0, max_connections=4)
    with served(config) as port, ExitStack() as stack:
        hoard = [stack.enter_context(connect_from("127.0.0.2", port)) for _ in range(4)]
        for peer in hoard:
            peer.sendall(HEAD + b"\r\n")
            assert answer_of(peer)[0] == 200
        others = [stack.enter_context(connect_from("127.0.0.3", port)) for _ in range(2)]
        for peer in others:
            peer.sendall(HEAD + b"\r\n")
            assert answer_of(peer)[0] == 200
        assert [until_closed(peer) for peer in hoard[:2]] == [b"", b""]
        third = stack.enter_context(connect_from("127.0.0.3", port))
        third.sendall(HEAD + b"\r\n")
        assert refusal(until_closed(third)) == (503, "queue_full"), (
            "it has as many as the other one"
        )
        for peer in (*hoard[2:], *others):
            peer.sendall(HEAD + b"\r\n")
            assert answer_of(peer)[0] == 200


def test_requests_that_do_not_wait_for_answers_are_bounded():
    """Each would cost the server a hundred times its own size."""
    with served(ServiceConfig(), slow_app()) as port, connect(port) as peer:
        with suppress(ConnectionError):
            peer.sendall(b"GET /slow HTTP/1.1\r\n\r\n" + b"GET / HTTP/1.1\r\n\r\n" * 10_000)
        assert until_closed(peer) == b""


def test_what_is_sent_after_many_pipelined_requests_is_not_read(port: int):
    with connect(port) as peer:
        for _ in range(20):
            peer.sendall((HEAD + b"\r\n") * MAX_PIPELINED)
            assert [answer_of(peer)[0] for _ in range(MAX_PIPELINED)] == [200] * MAX_PIPELINED


def test_a_refusal_is_not_taken_for_the_answer_to_an_earlier_request():
    with served(ServiceConfig(), slow_app()) as port, connect(port) as peer:
        peer.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\nGARBAGE\r\n\r\n")
        assert until_closed(peer) == b""


def test_who_does_not_read_an_answer_is_closed():
    config = ServiceConfig(unread_timeout_s=0.2)
    with served(config, slow_app()) as port, connect(port) as peer:
        peer.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        eventually(ENDED.is_set, what="the answer is given up")


def test_who_comes_far_too_late_is_not_even_heard():
    config = ServiceConfig(header_timeout_s=30.0, max_connections=2)
    with served(config) as port, ExitStack() as stack:
        peers = [stack.enter_context(connect(port)) for _ in range(5)]
        assert until_closed(peers[-1]) == b""
