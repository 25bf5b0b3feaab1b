"""What happens to an answer whose connection is gone."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

import pytest

from headway.contracts.http.paths import HEALTH
from headway.runtime.http_service import create_service


@asynccontextmanager
async def nothing(_app):
    yield


async def ask(fault: Exception) -> None:
    """A probe whose answer cannot be sent."""
    app = create_service("test", nothing, 1024)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: dict[str, Any]) -> None:
        raise fault

    scope = {"type": "http", "method": "GET", "path": HEALTH, "root_path": "", "scheme": "http"}
    await app({**scope, "query_string": b"", "headers": [], "state": {}}, receive, send)


async def test_a_connection_that_is_closed_is_no_crash():
    await ask(RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed"))


async def test_other_errors_of_sending_are():
    with pytest.raises(RuntimeError, match="another"):
        await ask(RuntimeError("another"))
