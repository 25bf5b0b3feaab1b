"""Requests made from the schemas, then broken: what is refused leaves nothing behind, and costs little.

Schemathesis makes a request that fits; values in its body are replaced by some that nobody expects.
Whether answers are the documented ones is another test's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from headway.contracts.http import paths
from headway.runtime.secret import authorization
from tests.attack.mutations import EVIL, places, replaced
from tests.attack.stalls import without_stall
from tests.integration.conftest import model_dir  # noqa: F401 - a fixture
from tests.integration.guarded import GATEWAY, KINDS, SECRETS, SERVER, Guarded, guarded_run
from tests.integration.test_schemathesis import OPERATIONS, OUTAGES, SCHEMAS, hasten

pytestmark = pytest.mark.extended

NUM_REQUESTS = 4
NUM_VALUES = 6
"""Of a request's body that are replaced, one after another."""
DEADLINE_S = 30.0
MOST_GROWTH = 96 << 20
"""Bytes that a process may hold more of after all requests: it answered thousands of kinds."""
HEADERS = authorization(SECRETS["admin"])
FAILED_RUN = ("workflow", "error_budget", "reward", "backend", "sync")


def state_of(guarded: Guarded) -> dict[str, Any]:
    """What only an accepted request may change."""
    board = guarded.ask(GATEWAY, "GET", paths.DASHBOARD).json()
    status = board["status"]
    server = guarded.ask(SERVER, "GET", paths.STATUS).json()
    return {
        "submitted": status["counts"]["submitted"],
        "head": status["head"],
        "version": server["version"],
        "sessions": board["sessions_open"],
        "servers": len(status["servers"]),
    }


def memory_of(guarded: Guarded) -> dict[str, int]:
    return {kind: psutil.Process(guarded.pid(kind)).memory_info().rss for kind in KINDS}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, model_dir) -> Iterator[Guarded]:  # noqa: F811
    with guarded_run(tmp_path_factory.mktemp("fuzz"), model_dir) as both:
        before = memory_of(both)
        yield both
        growth = {kind: used - before[kind] for kind, used in memory_of(both).items()}
        assert max(growth.values()) < MOST_GROWTH, growth
        assert both.is_alive()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.headers.update(HEADERS)
        yield session


WITH_BODY = [
    (kind, method, path)
    for kind, method, path in OPERATIONS
    if "requestBody" in SCHEMAS[kind][path][method].definition.raw
]


@pytest.mark.parametrize(("kind", "method", "path"), WITH_BODY)
def test_what_is_refused_leaves_nothing_behind(
    guarded: Guarded, session: requests.Session, kind: str, method: str, path: str
):
    rng = random.Random(path)
    operation = SCHEMAS[kind][path][method]
    fitting = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)

    def send(case: schemathesis.Case, body: Any) -> None:
        case.body = body
        hasten(path, case.body)
        before = state_of(guarded)
        answer = case.call(guarded.urls[kind], session=session, timeout=DEADLINE_S)
        if answer.status_code >= 500 and answer.status_code not in OUTAGES:
            assert answer.json()["code"] in FAILED_RUN, answer.text
        if 400 <= answer.status_code < 500:
            after = state_of(guarded)
            # Servers that were taken in earlier are lost meanwhile.
            assert after.pop("servers") <= before.pop("servers")
            assert after == before, f"{answer.status_code} {answer.text[:300]}"

    @settings(
        max_examples=NUM_REQUESTS,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=fitting)
    def attack(case: schemathesis.Case) -> None:
        body = case.body
        known = list(places(body))
        for place in rng.choices(known, k=NUM_VALUES):
            send(case, replaced(body, place, rng.choice(EVIL)))

    try:
        without_stall(attack, *guarded.urls.values(), headers=HEADERS)
    finally:
        if kind == SERVER:  # it may have been told to pause
            assert guarded.ask(SERVER, "POST", paths.GENERATION_RESUME).status_code == 204
