"""Clients that are slow, flood, pipeline, smuggle or do not read: others go on, and nothing grows."""

from __future__ import annotations

import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from headway.contracts.http import paths
from headway.launch.quickstart import task
from headway.runtime.secret import authorization
from tests.attack.floods import END, FLOODS, HEAD
from tests.attack.stalls import without_stall
from tests.integration.conftest import TINY
from tests.integration.guarded import GATEWAY, KINDS, MAX_BODY_BYTES, SECRETS, Guarded, guarded_run
from tests.waiting import eventually

pytestmark = pytest.mark.extended

MAX_GROWTH_BYTES = 64 << 20
"""Of a process's memory under one attack."""
ADMIN = authorization(SECRETS["admin"])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    model = tmp_path_factory.mktemp("model")
    task.write_model(model, TINY)
    with guarded_run(tmp_path_factory.mktemp("run"), model) as both:
        play(both)  # what is imported at first use is there
        yield both
        assert both.is_alive()


def play(guarded: Guarded) -> None:
    """One rollout of a client that means no harm, from its submission to its result."""
    name = uuid.uuid4().hex
    rollout = {
        "rollout_id": name,
        "prompt": {"group_id": name, "text": "12", "data": {"answer": "1"}},
        "reward": {"name": "exact", "args": {"pattern": "[0-9]"}},
        "gconfig": {"max_new_tokens": 2},
    }
    guarded.ask(GATEWAY, "POST", paths.ROLLOUTS, json={"rollouts": [rollout]}).raise_for_status()
    wanted = {"delivery_id": name, "count": 1, "rollout_ids": [name], "timeout_s": 30.0}
    answer = guarded.ask(GATEWAY, "POST", paths.ROLLOUTS_WAIT, json=wanted)
    assert answer.status_code == 200, answer.text


def memory_of(pid: int) -> int:
    """Resident bytes."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def survive(guarded: Guarded, attack: Callable[[], None]) -> None:
    """Assert that rollouts are played under an attack, that no loop stands still, and nothing grows."""
    before = {kind: memory_of(guarded.pid(kind)) for kind in KINDS}
    without_stall(lambda: _outlast(guarded, attack), *guarded.urls.values(), headers=ADMIN)
    for kind in KINDS:
        growth = memory_of(guarded.pid(kind)) - before[kind]
        assert growth < MAX_GROWTH_BYTES, f"{kind} grew by {growth >> 20} MiB"


def _outlast(guarded: Guarded, attack: Callable[[], None]) -> None:
    played: list[float] = []
    ended = threading.Event()

    def go_on() -> None:
        while not ended.is_set():
            play(guarded)
            played.append(time.monotonic())

    victim = threading.Thread(target=go_on)
    victim.start()
    try:
        eventually(lambda: played, what="the victim plays")
        begun = len(played)
        attack()
        eventually(lambda: len(played) > begun + 1, what="the victim goes on")
    finally:
        ended.set()
        victim.join()


def connect(guarded: Guarded, kind: str) -> socket.socket:
    address = httpx.URL(guarded.urls[kind])
    return socket.create_connection((address.host, address.port), timeout=20.0)


def until_closed(peer: socket.socket) -> bytes:
    """All that comes."""
    answer = b""
    with suppress(ConnectionError):
        while piece := peer.recv(1 << 16):
            answer += piece
    return answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.__name__)
def test_a_flood_on_a_few_connections(
    guarded: Guarded, kind: str, flood: Callable[[socket.socket], None]
):
    def attack() -> None:
        with ExitStack() as stack:
            peers = [stack.enter_context(connect(guarded, kind)) for _ in range(4)]
            threads = [threading.Thread(target=flood, args=(peer,)) for peer in peers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    survive(guarded, attack)


@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_slow_clients(guarded: Guarded, kind: str):
    """Each holds a connection until it is given up, a byte at a time."""

    def attack() -> None:
        with ExitStack() as stack:
            peers = [stack.enter_context(connect(guarded, kind)) for _ in range(300)]
            for peer in peers:
                peer.sendall(HEAD)
            for _ in range(5):
                for peer in peers:
                    with suppress(OSError):
                        peer.sendall(b"x")
            assert {until_closed(peer) for peer in peers} == {b""}

    survive(guarded, attack)


SMUGGLED = [
    b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/status HTTP/1.1\r\n\r\n",
    b"content-length: 0\r\ncontent-length: 30\r\n\r\nGET /v1/status HTTP/1.1\r\n\r\n",
    b"transfer-encoding: xchunked\r\n\r\nGET /v1/status HTTP/1.1\r\n\r\n",
    b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    b"transfer-encoding : chunked\r\n\r\n0\r\n\r\nGET /v1/status HTTP/1.1\r\n\r\n",
]


@pytest.mark.parametrize("kind", KINDS)
def test_smuggled_requests_get_no_answer_of_their_own(guarded: Guarded, kind: str):
    def attack() -> None:
        for tail in SMUGGLED:
            with connect(guarded, kind) as peer:
                peer.sendall(END + tail)
                answer = until_closed(peer)
                assert answer.count(b"HTTP/1.1 ") == 1, answer
                assert answer.startswith(b"HTTP/1.1 400 "), answer

    survive(guarded, attack)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_without_a_token_are_refused_fast_enough_for_others(guarded: Guarded, kind: str):
    def attack() -> None:
        with httpx.Client(base_url=guarded.urls[kind], timeout=20.0) as http:
            for _ in range(500):
                answer = http.post(paths.ROLLOUTS, content=b"[" * 10_000)
                assert answer.status_code == 401

    survive(guarded, attack)


VALUES = [b"[],", b"1234,", b'{"a":{}},', b'"ab",']


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", VALUES, ids=["lists", "integers", "objects", "texts"])
def test_many_values_in_the_body_of_who_has_a_token(guarded: Guarded, kind: str, value: bytes):
    many = b"[" + value * ((MAX_BODY_BYTES - 1024) // len(value)) + b"1]"
    headers = {"content-type": "application/json"}

    def attack() -> None:
        for path, body in (
            (paths.ROLLOUTS, many),
            (paths.ROLLOUTS, b'{"rollouts": ' + many + b"}"),
            (paths.ROLLOUTS_CANCEL, b'{"rollout_ids": [{}, ' + many[1:] + b"}"),
            (paths.GENERATE, b'{"rid": "a", "gconfig": {}, "input_ids": [{}, ' + many[1:] + b"}"),
        ):
            answer = guarded.ask(kind, "POST", path, content=body, headers=headers)
            assert answer.status_code == 422, answer.text[:300]

    survive(guarded, attack)


def test_an_agent_is_sent_to_no_other_host(guarded: Guarded):
    """Who has a token may name any host; the address of a session is the gateway's own all the same."""
    body = {"rollout_id": uuid.uuid4().hex, "gconfig": {"max_new_tokens": 2}}
    headers = {"host": "elsewhere.example"}
    answer = guarded.ask(GATEWAY, "POST", paths.SESSIONS, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["openai_url"].startswith(guarded.urls[GATEWAY] + "/")
    assert "elsewhere" not in answer.text
