"""Who may call what: roles, refusals, and the audit of both."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import pytest
from fastapi import APIRouter
from fastapi.testclient import TestClient
from starlette.routing import BaseRoute, Match, Mount

from gateway.app.main import make_gateway
from headway.contracts.config.gateway import INCLUDED, ROLES, GatewayConfig, ServiceConfig
from headway.contracts.config.server import FakeBackendConfig, ServerConfig
from headway.contracts.errors import ConfigError, Forbidden, Unauthorized
from headway.contracts.http import paths
from headway.runtime.access import NOBODY, Access, Token
from headway.runtime.exact_routes import ExactRoutes
from headway.runtime.http_service import create_service
from headway.runtime.json_route import JsonRoute
from headway.runtime.listener import check_exposure
from headway.runtime.secret import authorization
from inference_server.app import make_app
from inference_server.engine import make_generator
from tests.unit.runtime.served import no_lifespan

SECRETS = {role: f"secret-of-{role}" for role in ROLES}
ACCESS = Access([Token(role, SECRETS[role], (role,)) for role in ROLES])


def header(role: str) -> bytes:
    return f"Bearer {SECRETS[role]}".encode()


def flat(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """Routes of included routers, too, which newer versions of FastAPI keep apart."""
    for route in routes:
        if isinstance(route, ExactRoutes):  # shows no others
            continue
        included = getattr(route, "original_router", None)
        yield from [route] if included is None else flat(included.routes)


def gateway_routes() -> list[BaseRoute]:
    return list(flat(make_gateway(GatewayConfig(tokenizer="unused")).routes))


def server_routes() -> list[BaseRoute]:
    config = ServerConfig(model={"path": "unused"}, backend=FakeBackendConfig())
    return list(flat(make_app(config, make_generator(config)).routes))


ROUTES = {"gateway": gateway_routes, "server": server_routes}


def endpoints(kind: str) -> set[tuple[str, str]]:
    found = set()
    for route in ROUTES[kind]():
        path = route.path.replace(":path}", "}")
        methods = ("GET",) if isinstance(route, Mount) else route.methods
        found |= {(method, path) for method in methods if method != "HEAD"}
    return found


def is_open(path: str) -> bool:
    return path in paths.OPEN_PATHS or path.startswith(paths.OPEN_PREFIXES)


@pytest.mark.parametrize("kind", ROUTES)
def test_every_route_has_a_role(kind: str):
    closed = {f"{method} {path}" for method, path in endpoints(kind) if not is_open(path)}
    assert closed <= paths.ACCESS.keys(), "name the role of a new route in contracts.http.paths"


def test_every_role_belongs_to_a_route():
    served = {f"{method} {path}" for kind in ROUTES for method, path in endpoints(kind)}
    assert paths.ACCESS.keys() <= served


def test_what_is_open_below_a_prefix_is_a_session_or_the_page():
    opened = {path for kind in ROUTES for _, path in endpoints(kind) if is_open(path)}
    sessions = {path for path in opened if path.startswith(paths.SESSION_PATHS)}
    assert all(path.startswith(paths.SESSION) for path in sessions)
    pages = {path for path in opened if path.startswith(paths.UI)}
    assert opened - sessions - pages == {paths.HEALTH, paths.SGLANG_PING, paths.SGLANG_READY}


@pytest.mark.parametrize("kind", ROUTES)
def test_every_json_body_is_read_by_the_strict_parser(kind: str):
    loose = [
        route.path
        for route in ROUTES[kind]()
        if getattr(route, "body_field", None) is not None and not isinstance(route, JsonRoute)
    ]
    assert loose == []


@pytest.mark.parametrize("route", paths.ACCESS)
@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_what_it_includes(route: str, role: str):
    method, path = route.split()
    path = (
        path.replace("{version}", "3")
        .replace("{model}", "org/name")
        .replace("{", "")
        .replace("}", "")
    )
    admission = ACCESS.admit(method, path, header(role))
    assert (admission.route, admission.caller) == (route, role)
    may = paths.ACCESS[route] in INCLUDED[role]
    assert (admission.refusal is None) == may
    if not may:
        assert isinstance(admission.refusal, Forbidden)
        assert SECRETS[role] not in str(admission.refusal)


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        b"Basic secret-of-admin",
        b"secret-of-admin",
        b"Bearer secret-of-admi",
        b"Bearer secret-of-admin2",
        b"Bearer SECRET-OF-ADMIN",
        b"Bearer secret-of-submit secret-of-admin",
        b"Bearer \xff\xfe",
        b"Bearer " + b"a" * 30_000,
    ],
    ids=lambda given: repr(given[:32]),
)
def test_without_a_token_of_ours_nobody_comes_in(given: bytes):
    admission = ACCESS.admit("GET", paths.STATUS, given)
    assert isinstance(admission.refusal, Unauthorized)
    assert admission.caller == NOBODY


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/nothing"),
        ("GET", "/v1/status/"),
        ("GET", "//v1/status"),
        ("GET", "/V1/STATUS"),
        ("get", paths.STATUS),
        ("TRACE", paths.STATUS),
        ("POST", paths.STATUS),
        ("GET", "/v1/rollouts/a/b"),
        ("POST", "/v1/weights/pin\n"),
        ("GET", "/v1/sessionsx"),
    ],
)
def test_what_is_not_in_the_table_asks_for_the_highest_role(method: str, path: str):
    assert ACCESS.admit(method, path, header("admin")).refusal is None
    assert isinstance(ACCESS.admit(method, path, header("consume")).refusal, Forbidden)


def test_a_head_is_a_get():
    assert ACCESS.admit("HEAD", paths.OPENAPI, header("submit")).refusal is None


@pytest.mark.parametrize("path", [paths.HEALTH, "/v1/sessions/s1/end", "/ui", "/ui/page.js"])
def test_probes_sessions_and_the_page_ask_for_no_token_of_the_service(path: str):
    assert ACCESS.admit("GET", path, b"").refusal is None


def test_no_way_leads_from_a_session_to_another_route():
    """What is let through as a session's path is routed by the same text."""
    for kind in ROUTES:
        app_routes = ROUTES[kind]()
        for path in ("/v1/sessions/../weights", "/v1/sessions//weights", "/v1/sessions/%2e%2e/x"):
            scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
            matched = [route.path for route in app_routes if route.matches(scope)[0] == Match.FULL]
            assert all(one.startswith(paths.SESSION) for one in matched)


@pytest.mark.parametrize("kind", ROUTES)
def test_a_path_without_parameters_is_routed_as_by_trying_one_after_another(kind: str):
    routes = ROUTES[kind]()
    exact = ExactRoutes(routes)
    for method, path in endpoints(kind):
        scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
        first = next(route for route in routes if route.matches(scope)[0] == Match.FULL)
        match, found = exact.matches(scope)
        assert match == (Match.NONE if first.param_convertors else Match.FULL)
        assert found.get("route", first) is first


def test_without_tokens_everybody_may_do_everything():
    for route in paths.ACCESS:
        method, path = route.split()
        assert Access().admit(method, path, b"").refusal is None


def test_a_secret_stands_in_no_text_of_its_token():
    assert "secret" not in repr(Token("a", "secret", ("admin",)))


def test_a_server_registers_and_does_nothing_else():
    may = {route for route in paths.ACCESS if _may(route, "server")}
    assert may == {f"POST {paths.SERVERS}"}
    others = {role for role in ROLES if _may(f"POST {paths.SERVERS}", role)}
    assert others == {"server", "admin"}


def _may(route: str, role: str) -> bool:
    return ACCESS.admit(*route.split(), header(role)).refusal is None


def test_roles_of_one_token_add_up():
    both = Access([Token("both", "b", ("submit", "server"))])
    assert both.admit("POST", paths.SERVERS, b"Bearer b").refusal is None
    assert both.admit("POST", paths.ROLLOUTS, b"Bearer b").refusal is None
    refusal = both.admit("POST", paths.ROLLOUTS_WAIT, b"Bearer b").refusal
    assert "asks for the role consume; the token both has submit, server" in str(refusal)


def test_tokens_come_from_the_environment(monkeypatch):
    for name in ("A", "B", "C"):
        monkeypatch.setenv(f"HEADWAY_TEST_{name}", f"text-{name}")
    config = ServiceConfig(
        token_env="HEADWAY_TEST_A",
        tokens=(
            {"name": "b", "env": "HEADWAY_TEST_B", "roles": ["submit", "consume"]},
            {"name": "c", "env": "HEADWAY_TEST_C", "roles": ["submit"]},
        ),
    )
    access = Access.from_config(config)
    for letter, route in (("A", paths.SERVERS), ("B", paths.ROLLOUTS_WAIT), ("C", paths.GENERATE)):
        given = f"Bearer text-{letter}".encode()
        assert access.admit("POST", route, given).refusal is None
    assert access.admit("POST", paths.SERVERS, b"Bearer text-B").refusal is not None
    monkeypatch.setenv("HEADWAY_TEST_C", "text-B")
    with pytest.raises(ConfigError, match="have the same text"):
        Access.from_config(config)
    monkeypatch.delenv("HEADWAY_TEST_C")
    with pytest.raises(ConfigError, match="HEADWAY_TEST_C, which is not set"):
        Access.from_config(config)


def test_two_tokens_of_one_name_are_refused():
    token = {"name": "a", "env": "A", "roles": ["submit"]}
    with pytest.raises(ValueError, match="each needs a name of its own"):
        ServiceConfig(tokens=(token, token))


def test_a_config_knows_which_variable_has_a_role():
    tokens = (
        {"name": "s", "env": "S", "roles": ["submit"]},
        {"name": "c", "env": "C", "roles": ["consume"]},
    )
    config = ServiceConfig(tokens=tokens)
    with pytest.raises(ConfigError, match="none with the role server"):
        config.env_for("server")
    assert [config.env_for(role) for role in ("submit", "consume")] == ["S", "C"]
    with pytest.raises(ConfigError, match="none with the role admin"):
        config.env_for("admin")
    assert ServiceConfig(tokens=tokens, token_env="T").env_for("admin") == "T"
    assert ServiceConfig().env_for("admin") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gateway", ""])
def test_the_network_is_not_let_in_by_accident(host: str):
    with pytest.raises(ConfigError, match=r"set service\.token_env or service\.tokens"):
        check_exposure(ServiceConfig(host=host))
    check_exposure(ServiceConfig(host=host, token_env="T"))
    check_exposure(
        ServiceConfig(host=host, tokens=({"name": "a", "env": "A", "roles": ["submit"]},))
    )
    check_exposure(ServiceConfig(host=host, allow_anonymous=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_asks_for_no_token(host: str):
    check_exposure(ServiceConfig(host=host))


def test_the_audit_tells_who_changed_what_and_who_was_refused(caplog):
    caplog.set_level(logging.INFO, "headway.audit")
    router = APIRouter(route_class=JsonRoute)

    @router.post(paths.WEIGHTS_PIN)
    @router.post(paths.SERVERS)
    @router.post(paths.GENERATE)
    async def answer() -> dict[str, int]:
        return {}

    @router.post(paths.WEIGHTS_ROLLBACK)
    async def crash() -> None:
        raise RuntimeError("a defect")

    app = create_service("test", no_lifespan, 1 << 20, ACCESS)
    app.include_router(router)
    client = TestClient(app, raise_server_exceptions=False)
    for number, (path, role) in enumerate(
        [
            (paths.WEIGHTS_PIN, "admin"),
            (paths.SERVERS, "admin"),
            (paths.GENERATE, "submit"),
            (paths.WEIGHTS_PIN, "submit"),
            ("/secret%0Aplaces", "submit"),
            (paths.WEIGHTS_ROLLBACK, "admin"),
        ]
    ):
        headers = {**authorization(SECRETS[role]), paths.REQUEST_ID_HEADER: f"r{number}"}
        client.post(path, headers=headers)
    client.post(paths.GENERATE, headers={paths.REQUEST_ID_HEADER: "forged\nline"})
    lines = [
        (r.message, r.caller, r.route, r.request_id, r.status)
        for r in caplog.records
        if r.name == "headway.audit"
    ]
    assert lines[:-1] == [
        ("called", "admin", "POST /v1/weights/pin", "r0", 200),
        ("refused", "submit", "POST /v1/weights/pin", "r3", 403),
        ("refused", "submit", "(unknown)", "r4", 403),
        ("called", "admin", "POST /v1/weights/rollback", "r5", 500),
    ]
    assert lines[-1][:3] == ("refused", NOBODY, "POST /v1/generate")
    assert lines[-1][3].isalnum()
    assert not any(secret in caplog.text for secret in SECRETS.values())
