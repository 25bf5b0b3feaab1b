"""What a browser can be made to send is refused; what clients send is not."""

from __future__ import annotations

import socket

import pytest
from fastapi import APIRouter
from fastapi.testclient import TestClient

from headway.contracts.config.gateway import ServiceConfig
from headway.contracts.http import paths
from headway.runtime.access import Access
from headway.runtime.allowed_hosts import AllowedHosts
from headway.runtime.http_service import create_service
from headway.runtime.json_route import JsonRoute
from tests.unit.runtime.served import no_lifespan

HERE = "127.0.0.1:8000"
OPEN = 200


def client(token: str | None = None, *allowed: str) -> TestClient:
    router = APIRouter(route_class=JsonRoute)

    @router.post(paths.WEIGHTS_PIN)
    @router.get(paths.STATUS)
    @router.get(paths.UI)
    @router.get(paths.SESSION)
    async def answer() -> dict[str, int]:
        return {}

    hosts = AllowedHosts(allowed, ["https://agents.example.org/base", None])
    app = create_service("test", no_lifespan, 1 << 20, Access.of(token), hosts)
    app.include_router(router)
    return TestClient(app, base_url=f"http://{HERE}")


OURS = [
    HERE,
    "127.0.0.1",
    "10.1.2.3:80",
    "[::1]:8000",
    "[2001:db8::1]",
    "localhost:8000",
    "LOCALHOST",
    "a.localhost",
    "gateway:8000",
    "x",
    f"{socket.gethostname()}:1",
    "agents.example.org",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "rebind.network.",
    "1.2.3.4.5",
    "[::1",
    "agents.example.org.evil.example",
]


@pytest.mark.parametrize("host", OURS)
def test_names_of_a_service_need_no_setting(host: str):
    assert client().get(paths.STATUS, headers={"host": host}).status_code == OPEN


@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_name_is_refused(host: str):
    """A page whose name resolves to this service's address."""
    answer = client().get(paths.STATUS, headers={"host": host})
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert "service.allowed_hosts" in answer.json()["message"]


def test_names_that_are_configured_are_taken():
    taken = client(None, "gw.example.com", ".corp.example")
    for host in ("gw.example.com", "GW.example.com:99", "a.corp.example", "a.b.corp.example"):
        assert taken.get(paths.STATUS, headers={"host": host}).status_code == OPEN, host
    for host in ("b.gw.example.com", "corp.example.org", "evilcorp.example"):
        assert taken.get(paths.STATUS, headers={"host": host}).status_code == 403, host
    assert client(None, "*").get(paths.STATUS, headers={"host": FOREIGN[0]}).status_code == OPEN


@pytest.mark.parametrize("name", ["", "http://x", "a b", "a:80", "*.example.com", "a..b"])
def test_what_is_no_name_is_no_setting(name: str):
    with pytest.raises(ValueError, match="allowed_hosts"):
        ServiceConfig(allowed_hosts=(name,))


def test_who_has_a_secret_may_use_any_name():
    headers = {"host": "proxy.example.net", "authorization": "Bearer secret"}
    assert client("secret").get(paths.STATUS, headers=headers).status_code == OPEN
    session = paths.SESSION.format(session_id="s")  # asks for its own key
    assert client().get(session, headers=headers).status_code == OPEN
    assert client().get(paths.STATUS, headers=headers).status_code == 403, "nobody asked for it"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": f"ftp://{HERE}"},
        {"origin": "file://"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=lambda headers: "-".join(*headers.items()),
)
@pytest.mark.parametrize("token", [None, "secret"])
def test_a_page_of_another_origin_calls_nothing(headers: dict[str, str], token: str | None):
    given = headers if token is None else {**headers, "authorization": f"Bearer {token}"}
    assert client(token).post(paths.WEIGHTS_PIN, headers=given).status_code == 403
    assert client(token).get(paths.STATUS, headers=given).status_code == 403


def test_own_pages_and_links_to_them_work():
    here = client(None, "ui.example.com")
    for origin in (f"http://{HERE}", f"https://{HERE}", "https://ui.example.com"):
        assert here.post(paths.WEIGHTS_PIN, headers={"origin": origin}).status_code == OPEN
    assert here.get(paths.STATUS, headers={"sec-fetch-site": "same-origin"}).status_code == OPEN
    assert here.get(paths.UI, headers={"sec-fetch-site": "cross-site"}).status_code == OPEN


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b", "json"],
)
def test_a_change_is_asked_for_in_json(kind: str):
    answer = client().post(paths.WEIGHTS_PIN, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    "kind", [None, "application/json", "Application/JSON; charset=utf-8", "application/v1+json"]
)
def test_json_and_no_body_are_taken(kind: str | None):
    headers = {} if kind is None else {"content-type": kind}
    assert client().post(paths.WEIGHTS_PIN, headers=headers).status_code == OPEN


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "host", "origin", "content-type"])
def test_a_header_that_counts_is_there_once(name: str):
    twice = [("authorization", "Bearer secret"), (name, "a"), (name, "b")]
    answer = client("secret").get(paths.STATUS, headers=twice)
    assert answer.status_code in (400, 401)
    last = [(name, "a"), ("authorization", "Bearer wrong"), ("authorization", "Bearer secret")]
    answer = client("secret").get(paths.STATUS, headers=last)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
