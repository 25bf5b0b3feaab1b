"""Calls that block: over connections that are used again, never in doubt, and given up with a reason."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from headway.runtime.blocking import BlockingConnections, Timeouts
from headway.runtime.connections import ConnectionBroken, HttpResponse, NotConnected

TIMEOUTS = Timeouts(connect_s=5.0, silent_s=10.0)
OK = b"HTTP/1.1 200 OK\r\nRetry-After: 3\r\ncontent-length: 2\r\n\r\nhi"

Serve = Callable[["Peer"], None]


class Peer:
    """One connection, seen from the service."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._seen = b""

    def hear(self) -> tuple[bytes, bytes]:
        """Head and body of the next request; raises `EOFError` where there is none."""
        head = self._until(lambda seen: b"\r\n\r\n" in seen).split(b"\r\n\r\n")[0]
        self._seen = self._seen[len(head) + 4 :]
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or b"0")
        body = self._until(lambda seen: len(seen) >= length)[:length]
        self._seen = self._seen[length:]
        return head, body

    def _until(self, is_enough: Callable[[bytes], bool]) -> bytes:
        while not is_enough(self._seen):
            if not (more := self.sock.recv(4096)):
                raise EOFError
            self._seen += more
        return self._seen


class Service:
    """Serves every connection as it is told, in a thread, and counts them."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            self._threads.append(threading.Thread(target=self._connected, args=(sock,)))
            self._threads[-1].start()

    def _connected(self, sock: socket.socket) -> None:
        with sock, suppress(EOFError, ConnectionError):
            self._serve(Peer(sock))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10.0)
            assert not thread.is_alive()


@contextmanager
def opened(serve: Serve) -> Iterator[tuple[Service, BlockingConnections]]:
    service = Service(serve)
    headers = {"authorization": "Bearer x"}
    calls = BlockingConnections(ssl.create_default_context(), headers, keep_alive_s=60.0)
    try:
        yield service, calls
    finally:
        calls.close()
        service.close()


def post(calls: BlockingConnections, url: str, body: bytes = b"{}") -> HttpResponse:
    return calls.ask("POST", url, body, TIMEOUTS)


def always(peer: Peer) -> None:
    while True:
        peer.hear()
        peer.sock.sendall(OK)


def test_one_connection_serves_one_request_after_the_other():
    heard = []

    def serve(peer: Peer) -> None:
        while True:
            heard.append(peer.hear())
            peer.sock.sendall(OK)

    with opened(serve) as (service, calls):
        for _ in range(3):
            answer = post(calls, f"{service.url}/v1/x?y=1")
            assert (answer.status, answer.content) == (200, b"hi")
            assert answer.headers[b"retry-after"] == b"3"
        assert service.num_connections == 1
    head, body = heard[0]
    assert head.startswith(b"POST /v1/x?y=1 HTTP/1.1\r\n") and body == b"{}"
    lines = head.lower().split(b"\r\n")
    assert b"authorization: bearer x" in lines and b"content-type: application/json" in lines


def test_an_answer_without_content():
    def serve(peer: Peer) -> None:
        while True:
            peer.hear()
            peer.sock.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    with opened(serve) as (service, calls):
        for _ in range(2):
            answer = post(calls, service.url)
            assert (answer.status, answer.content) == (204, b"")
        assert service.num_connections == 1


def test_no_proxy_of_the_environment_hears_of_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with opened(always) as (service, calls):
        assert post(calls, service.url).status == 200


def test_a_thread_that_waits_holds_up_no_other_one():
    asked, told = threading.Event(), threading.Event()

    def serve(peer: Peer) -> None:
        while True:
            if peer.hear()[1] == b"later":
                asked.set()
                assert told.wait(10.0)
            peer.sock.sendall(OK)

    with opened(serve) as (service, calls), ThreadPoolExecutor(1) as other:
        waiting = other.submit(post, calls, service.url, b"later")
        assert asked.wait(10.0)
        assert post(calls, service.url).content == b"hi"
        assert not waiting.done()
        told.set()
        assert waiting.result(10.0).content == b"hi"


def test_one_that_ended_between_two_requests_is_noticed():
    ended = threading.Event()

    def serve(peer: Peer) -> None:
        peer.hear()
        peer.sock.sendall(OK)
        peer.sock.shutdown(socket.SHUT_RDWR)
        ended.set()

    with opened(serve) as (service, calls):
        for _ in range(2):
            assert post(calls, service.url).content == b"hi"
            assert ended.wait(10.0)
            ended.clear()
        assert service.num_connections == 2


@pytest.mark.parametrize(
    "wrong",
    [
        "http://[::1",
        "ftp://127.0.0.1:1",
        "127.0.0.1:8000",
        "http://",
        "http://x:y",
        f"http://{'a' * 64}.example",
    ],
)
def test_what_is_no_url(wrong: str):
    with opened(always) as (_, calls), pytest.raises(NotConnected, match="no URL of a service"):
        post(calls, wrong)


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with opened(always) as (_, calls), pytest.raises(NotConnected, match="refused"):
        post(calls, url)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        OK[:-1],
        b"HTTP/1.1 200 OK\r\n\r\nh",
        b"220 smtp.example ready\r\n\r\n",
    ],
    ids=["nothing", "half a head", "half a body", "a body without an end", "no HTTP"],
)
def test_an_answer_that_is_not_whole(said: bytes):
    def serve(peer: Peer) -> None:
        peer.hear()
        peer.sock.sendall(said)

    with opened(serve) as (service, calls), pytest.raises(ConnectionBroken):
        post(calls, service.url)


def test_a_service_that_is_silent_and_the_next_request():
    def serve(peer: Peer) -> None:
        while True:
            _, body = peer.hear()
            if body == b"speak":
                peer.sock.sendall(OK)

    with opened(serve) as (service, calls):
        with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
            calls.ask("POST", service.url, b"{}", Timeouts(connect_s=5.0, silent_s=0.05))
        assert post(calls, service.url, b"speak").content == b"hi"
        assert service.num_connections == 2
