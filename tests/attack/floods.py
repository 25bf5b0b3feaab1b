"""What a client sends that means to cost others their service: on one connection, no token needed."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"
END = b"POST /v1/sessions/x/end HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def flood(peer: socket.socket, piece: bytes, times: int) -> None:
    """Send until it is over, or until the other side has had enough."""
    peer.settimeout(2.0)
    with suppress(OSError):
        for _ in range(times):
            peer.sendall(piece)


def pipeline(peer: socket.socket) -> None:
    flood(peer, b"GET / HTTP/1.1\r\n\r\n" * 1000, 800)


def pipeline_slow_answers(peer: socket.socket) -> None:
    flood(peer, b"GET /v1/status HTTP/1.1\r\nhost: x\r\n\r\n" * 1000, 100)


def huge_head(peer: socket.socket) -> None:
    flood(peer, HEAD + b"x: " + b"a" * (1 << 20), 20)


def many_fields(peer: socket.socket) -> None:
    flood(peer, HEAD + b"a: b\r\n" * 100_000, 5)


def body_without_key(peer: socket.socket) -> None:
    flood(peer, END + b"content-length: 62914560\r\n\r\n", 1)
    flood(peer, b"[" * (1 << 20), 60)


def endless_chunks(peer: socket.socket) -> None:
    flood(peer, END + b"transfer-encoding: chunked\r\n\r\n", 1)
    flood(peer, b"1\r\n[\r\n" * 10_000, 30)


def garbage(peer: socket.socket) -> None:
    flood(peer, b"\r\n" * 100_000, 20)


FLOODS: list[Callable[[socket.socket], None]] = [
    pipeline,
    pipeline_slow_answers,
    huge_head,
    many_fields,
    body_without_key,
    endless_chunks,
    garbage,
]
