"""The HTTP surface changes on purpose only.

    HEADWAY_UPDATE_SNAPSHOTS=1 python -m pytest tests/contract/test_openapi.py

writes the stored schemas again; look at their diff, it is what clients will notice.
"""

import json
import os
from pathlib import Path

import fastapi
import pytest
from fastapi import FastAPI
from packaging.version import Version

from gateway.app.main import make_gateway
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.server import FakeBackendConfig, ServerConfig
from headway.contracts.http import paths
from inference_server.app import make_app
from inference_server.engine import make_generator

DATA = Path(__file__).parent / "data"


def gateway() -> FastAPI:
    return make_gateway(GatewayConfig(tokenizer="unused"))


def server() -> FastAPI:
    config = ServerConfig(model={"path": "unused"}, backend=FakeBackendConfig())
    return make_app(config, make_generator(config))


APPS = {"gateway": gateway, "server": server}


@pytest.mark.skipif(
    Version(fastapi.__version__) < Version("0.165"),
    reason="older releases of FastAPI describe the same surface in other words",
)
@pytest.mark.parametrize("name", APPS)
def test_the_http_surface_is_the_stored_one(name):
    schema = APPS[name]().openapi()
    surface = {"paths": schema["paths"], "components": schema["components"]}
    text = json.dumps(surface, indent=1, sort_keys=True) + "\n"
    file = DATA / f"openapi-{name}.json"
    if os.environ.get("HEADWAY_UPDATE_SNAPSHOTS") == "1":
        file.write_text(text)
    stored = file.read_text() if file.is_file() else "{}"
    assert json.loads(stored) == surface, (
        f"the HTTP surface of the {name} differs from {file.name}; if that is meant, run "
        "`HEADWAY_UPDATE_SNAPSHOTS=1 python -m pytest tests/contract/test_openapi.py`, "
        "look at the diff and commit it"
    )


BASES = (paths.SESSION_OPENAI, paths.SESSION_ANTHROPIC, paths.SESSION_PATHS)
"""Base URLs of clients, who spell what lies below."""
UNLISTED = (paths.OPENAPI, paths.UI)
"""Served, and not on the OpenAPI page."""


def test_every_path_is_spelled_in_the_contract():
    values = [value for name, value in vars(paths).items() if name.isupper()]
    spelled = {value for value in values if isinstance(value, str) and value[:1] == "/"}
    served = {path for make in APPS.values() for path in make().openapi()["paths"]}
    below = {path for path in served if path.startswith(BASES[:2])}
    assert served - below <= spelled
    assert spelled - {*BASES, *UNLISTED} <= served, "a path of the contract is served by nobody"
