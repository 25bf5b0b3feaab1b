"""A server process and what it ends with."""

import signal

import pytest

from headway.contracts.config.server import ServerConfig
from headway.contracts.errors import ConfigError
from inference_server.app import _end_with
from inference_server.backends.fake import FakeBackend
from inference_server.main import main


async def test_a_server_ends_with_its_backend():
    class DeadBackend(FakeBackend):
        failure = "its child ended"

    config = ServerConfig.model_validate({"model": {"path": "x"}, "backend": {"type": "fake"}})
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        await _end_with(DeadBackend(config.backend, config.model, 0))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_an_address_that_no_gateway_can_call_is_refused():
    arguments = ["--model.path", "x", "--backend.type", "fake", "--service.host", "0.0.0.0"]
    with pytest.raises(ConfigError, match="set advertise_url"):
        main([*arguments, "--gateway", "http://gateway:8000"])
