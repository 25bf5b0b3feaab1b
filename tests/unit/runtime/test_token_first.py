"""A client without a token is told so before a byte of the body is read, on every route."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from gateway.app.main import make_gateway
from gateway.sessions.sessions import Sessions
from headway.contracts.config.gateway import GatewayConfig, SessionsConfig
from headway.contracts.config.server import FakeBackendConfig, ServerConfig
from headway.contracts.http import paths
from headway.runtime.access import Access
from inference_server.app import make_app
from inference_server.engine import make_generator
from tests.unit.runtime.test_access import endpoints


def make_app_of(kind: str) -> FastAPI:
    access = Access.of("secret")
    if kind == "gateway":
        app = make_gateway(GatewayConfig(tokenizer="unused"), access=access)
    else:
        config = ServerConfig(model={"path": "unused"}, backend=FakeBackendConfig())
        app = make_app(config, make_generator(config), access)
    app.state.service = SimpleNamespace(sessions=Sessions(SessionsConfig()))
    return app


async def ask(app: FastAPI, method: str, path: str, headers: dict[str, str]) -> int:
    """Status of the answer to a request whose body must not be read."""
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        pytest.fail(f"{method} {path} reads the body of who has no token")

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "state": {},
    }
    await asyncio.wait_for(app(scope, receive, send), 10)
    return statuses[0]


HUGE = {"content-type": "application/json", "content-length": str(60 << 20)}


@pytest.mark.parametrize("kind", ["gateway", "server"])
async def test_the_token_counts_before_the_body(kind: str):
    app = make_app_of(kind)
    for method, path in sorted(endpoints(kind)):
        if path in paths.OPEN_PATHS or path.startswith(f"{paths.UI}/"):
            continue
        concrete = path.replace("{", "").replace("}", "")
        assert await ask(app, method, concrete, HUGE) == 401, (method, path)
        wrong = {**HUGE, "authorization": "Bearer wrong"}
        wanted = 404 if path.startswith(paths.SESSION_PATHS) else 401  # there is no such session
        assert await ask(app, method, concrete, wrong) == wanted, (method, path)
