"""What the OpenAPI pages say is what the services do, for requests that somebody else made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.app.main import make_gateway
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.server import FakeBackendConfig, ServerConfig
from headway.contracts.http import paths
from headway.runtime.secret import authorization
from inference_server.app import make_app
from inference_server.engine import make_generator
from tests.integration.guarded import GATEWAY, SECRETS, SERVER, Guarded, guarded_run

pytestmark = pytest.mark.extended

NUM_REQUESTS = 12
DEADLINE_S = 20.0
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
ENDLESS = (paths.ROLLOUTS_STREAM,)
"""Answers that only end with the connection."""
LAST = (paths.SERVERS, paths.CONSUMER, paths.WEIGHTS)
"""What stands in the way of others: servers that are none, a consumer that never consumes."""
WAITING = (paths.ROLLOUTS_WAIT, paths.SESSIONS, paths.WEIGHTS_PREPARE)
SOON_S = 0.05
OUTAGES = (503, 504)
FAILED_RUN = ("workflow", "error_budget", "reward")
"""Codes of 500 that tell of a rollout, not of a defect."""


def schemas() -> dict[str, Any]:
    config = ServerConfig(model={"path": "unused"}, backend=FakeBackendConfig())
    apps = {
        GATEWAY: make_gateway(GatewayConfig(tokenizer="unused")),
        SERVER: make_app(config, make_generator(config)),
    }
    return {
        kind: schemathesis.openapi.from_dict(without_tuples(app.openapi()))
        for kind, app in apps.items()
    }


def without_tuples(schema: Any) -> Any:
    """Lists of fixed length whose items may be any of theirs: schemathesis misreads `prefixItems`."""
    if isinstance(schema, list):
        return [without_tuples(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: without_tuples(part) for key, part in schema.items() if key != "prefixItems"}
    if "prefixItems" in schema:
        plain["items"] = {"anyOf": without_tuples(schema["prefixItems"])}
    return plain


SCHEMAS = schemas()
OPERATIONS = sorted(
    (
        (kind, method.upper(), path)
        for kind, schema in SCHEMAS.items()
        for path, item in schema.raw_schema["paths"].items()
        for method in item
        if path not in ENDLESS
    ),
    key=lambda operation: (operation[2] in LAST, operation),
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Guarded]:
    with guarded_run(tmp_path_factory.mktemp("schema"), model_dir) as both:
        yield both
        assert both.is_alive()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.headers.update(authorization(SECRETS["admin"]))
        yield session


def hasten(path: str, body: Any) -> None:
    """Waits are taken for granted."""
    if path in WAITING and isinstance(body, dict):
        wanted = body.get("timeout_s", SOON_S)
        is_wait = isinstance(wanted, int | float) and wanted > SOON_S
        body["timeout_s"] = SOON_S if is_wait else wanted


MODES = {"fitting": GenerationMode.POSITIVE, "broken": GenerationMode.NEGATIVE}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "method", "path"), OPERATIONS)
def test_answers_are_the_documented_ones(
    guarded: Guarded, session: requests.Session, kind: str, method: str, path: str, mode: str
):
    operation = SCHEMAS[kind][path][method]

    @settings(
        max_examples=NUM_REQUESTS,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=MODES[mode]))
    def check(case: schemathesis.Case) -> None:
        hasten(path, case.body)
        answer = case.call(guarded.urls[kind], session=session, timeout=DEADLINE_S)
        if answer.status_code >= 500 and answer.status_code not in OUTAGES:
            assert answer.json()["code"] in FAILED_RUN, answer.text
        case.validate_response(answer, checks=CHECKS)

    if mode == "broken" and not is_breakable(operation):
        pytest.skip("it takes nothing that could be broken")
    try:
        check()
    finally:
        if kind == SERVER:  # it may have been told to pause
            assert guarded.ask(SERVER, "POST", paths.GENERATION_RESUME).status_code == 204


def is_breakable(operation: schemathesis.APIOperation) -> bool:
    """Whether it takes more than texts in its path."""
    raw = operation.definition.raw
    places = [parameter["in"] for parameter in raw.get("parameters", [])]
    return "requestBody" in raw or any(place == "query" for place in places)
