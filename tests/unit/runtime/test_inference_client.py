"""How long the client goes on when the service is away, and what it takes for no answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from headway.contracts.config.base import ComponentConfig
from headway.contracts.errors import BackendError, WaitTimeout
from headway.contracts.http import paths
from headway.contracts.http.rewards import AnswerToScore
from headway.contracts.types import WeightUpdateMeta
from headway.runtime import inference_client, service_calls
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.service_calls import _Outage

STATE: Any = SimpleNamespace(outcome=None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(service_calls.time, "monotonic", lambda: clock.now)
    return clock


def failures(clock: SimpleNamespace, is_over: _Outage) -> int:
    """Attempts that fail at 7 s each, until no more are made."""
    for number in range(1, 100):
        clock.now += 7.0
        if is_over(STATE):
            return number
    raise AssertionError


def test_retries_end_when_the_service_was_away_for_so_long(clock: SimpleNamespace):
    assert failures(clock, _Outage(60.0)) == 9


def test_a_request_that_was_worked_on_for_long_is_no_outage(clock: SimpleNamespace):
    is_over = _Outage(60.0)
    clock.now += 400.0  # the gateway died under the first attempt
    assert not is_over(STATE)
    assert failures(clock, is_over) == 9


def test_the_log_says_what_is_waited_for_at_growing_intervals(clock: SimpleNamespace, caplog):
    assert failures(clock, _Outage(60.0, url="http://h:1")) == 9
    waited = [record.getMessage() for record in caplog.records]
    assert waited == [f"waiting for http://h:1, {s} s" for s in (7, 14, 28, 56)]


def test_a_client_that_is_closed_waits_for_no_service_that_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    client = RemoteInferenceEngine(f"http://127.0.0.1:{port}", connect_timeout_s=3600.0)
    update = client.update_weights(WeightUpdateMeta(1, "/v1"))
    client.destroy()
    assert isinstance(update.exception(0.0), BackendError)


class Empty(BaseHTTPRequestHandler):
    """Has three groups, which are too few."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(204)
        self.send_header(paths.READY_HEADER, "3")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_the_log_says_that_rollouts_are_waited_for(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(inference_client, "POLL_S", 0.01)
    caplog.set_level("INFO", inference_client.__name__)
    with serving(Empty) as client, pytest.raises(WaitTimeout):
        client.wait(4, 0.2)
    told = [record.getMessage() for record in caplog.records]
    assert all(line.endswith(" s: 3 of 4 prompt groups are ready") for line in told)
    assert 1 <= len(told) <= 5  # at 0.01 s, then after twice as long each time


class Forgetful(BaseHTTPRequestHandler):
    """Judges one answer, however many it is sent."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = b'{"results": [{"score": 1.0, "verdict": "scored", "details": {}}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[RemoteInferenceEngine]:
    """A client of a small service."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        client = RemoteInferenceEngine(f"http://127.0.0.1:{server.server_address[1]}")
        try:
            yield client
        finally:
            client.destroy()
            server.shutdown()
            thread.join()


def test_scores_are_as_many_as_the_answers():
    answers = [AnswerToScore(completion=text) for text in "ab"]
    with serving(Forgetful) as client, pytest.raises(BackendError, match="judged 1 of 2 answers"):
        client.score(ComponentConfig(name="exact"), answers)
