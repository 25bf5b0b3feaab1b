"""Calls to the outside, to a real service over loopback, and all that must not be called."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp.abc import AbstractResolver
from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse

from headway.contracts.config.gateway import OutboundConfig
from headway.contracts.errors import BackendError, ConfigError, DataError, Forbidden, ServiceAway
from headway.runtime.outbound import HttpOutbound
from tests.unit.gateway.app_server import served

FOREVER = asyncio.Event


def make_app() -> FastAPI:
    app = FastAPI()
    app.state.calls = []

    @app.post("/v1/echo")
    async def echo(request: Request):
        app.state.calls.append(dict(request.headers))
        return {"body": await request.json(), "host": request.headers["host"]}

    @app.post("/v1/answer/{status}")
    async def answer(status: int, request: Request):
        return Response(await request.json(), status_code=status)

    @app.post("/v1/away")
    async def away():
        return RedirectResponse("/v1/echo", status_code=307)

    @app.post("/v1/cookie")
    async def cookie(request: Request):
        response = Response(json.dumps(dict(request.cookies)))
        response.set_cookie("seen", "yes")
        return response

    @app.post("/v1/endless")
    async def endless():
        async def drip() -> AsyncIterator[bytes]:
            while True:
                yield b" " * 1024
                await asyncio.sleep(0)

        return StreamingResponse(drip())

    @app.post("/v1/restarting")
    async def restarting():
        statuses = app.state.statuses
        return Response("{}", status_code=statuses.pop() if statuses else 200)

    @app.post("/v1/never")
    async def never():
        await FOREVER().wait()

    return app


@pytest.fixture
async def app():
    return make_app()


@pytest.fixture
async def port(app):
    async with served(app) as port:
        yield port


class Names(AbstractResolver):
    """A name server; each look-up of a name gets its next answer."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def resolve(self, host, port=0, family=socket.AF_INET):
        self.asked.append(host)
        answers = self.answers[host.partition(".")[0]]
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST,
            }
            for address in addresses
        ]

    async def close(self):
        pass


@asynccontextmanager
async def outbound(*allow: str, resolver: Names | None = None, **fields):
    out = HttpOutbound(OutboundConfig(allow=allow, **fields), resolver)
    try:
        yield out
    finally:
        await out.aclose()


async def test_an_allowed_service_is_called_with_json_and_nothing_else(app, port, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    base = f"http://127.0.0.1:{port}/v1/"
    async with outbound(base, allow_private=True) as out:
        answer = await out.post(base + "echo", {"ä": [1, None]}, 5.0)
    assert answer == {"body": {"ä": [1, None]}, "host": f"127.0.0.1:{port}"}
    (headers,) = app.state.calls
    assert headers["content-type"] == "application/json"
    assert not {"authorization", "cookie", "referer"} & headers.keys()


async def test_a_name_is_looked_up_and_its_address_called(port):
    names = Names(rewards=[["127.0.0.1"]])
    base = f"http://rewards.test:{port}/v1"
    async with outbound(base, resolver=names, allow_private=True) as out:
        answer = await out.post(base + "/echo", 1, 5.0)
    assert answer == {"body": 1, "host": f"rewards.test:{port}"}
    assert names.asked == ["rewards.test"]


ALLOWED = "https://rewards.test/v1/"


@pytest.mark.parametrize(
    "url",
    [
        "https://rewards.test/v2/x",
        "https://rewards.test/v1",
        "https://rewards.test/v1x",
        "https://rewards.test/v1/../v2/x",
        "https://rewards.test/v1/%2e%2e/v2/x",
        "https://rewards.test/v1/..%2fv2/x",
        "https://rewards.test/v1/..%5cv2",
        "https://rewards.test/v1/%252e%252e/v2",
        "https://rewards.test/v1\\..\\v2",
        "https://rewards.test/v1/x\r\nhost: evil.test",
        "https://rewards.test/v1/ x",
        "https://rewards.test/v1/x%00",
        "http://rewards.test/v1/x",
        "https://rewards.test:444/v1/x",
        "https://rewards.test.evil.test/v1/x",
        "https://rewards.test./v1/x",
        "https://evil.test/v1/x",
        "https://rewards.test@evil.test/v1/x",
        "https://evil.test#@rewards.test/v1/x",
        "https://user:secret@rewards.test/v1/x",
        "https://rewards.test/v1/x#fragment",
        "https://rewards%2etest/v1/x",
        "//rewards.test/v1/x",
        "/v1/x",
        "https:rewards.test/v1/x",
        "file:///v1/etc/passwd",
        "gopher://rewards.test/v1/x",
        "https://rewards.test:99999/v1/x",
        "https://[rewards.test/v1/x",
        "",
    ],
)
async def test_what_no_prefix_covers_is_refused_before_anything_is_looked_up(url):
    names = Names()
    async with outbound(ALLOWED, resolver=names, allow_private=True) as out:
        with pytest.raises(Forbidden, match="may not be called"):
            await out.post(url, {}, 5.0)
    assert names.asked == []


async def test_without_an_allowed_prefix_nothing_is_called():
    async with outbound() as out:
        with pytest.raises(Forbidden, match=r"has \[\]"):
            await out.post("https://rewards.test/", {}, 5.0)


PRIVATE = [
    "127.0.0.1",
    "127.9.9.9",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "169.254.1.1",
    "169.254.169.254",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fd00::1",
    "fec0::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::7f00:1",
    "64:ff9b::7f00:1",
    "64:ff9b:1::7f00:1",
    "2002:7f00:1::",
    "168.63.129.16",
]


@pytest.mark.parametrize("address", PRIVATE)
async def test_an_address_that_is_not_public_is_refused_as_it_stands(address):
    host = f"[{address}]" if ":" in address else address
    async with outbound(f"http://{host}/") as out:
        with pytest.raises(Forbidden, match=r"no public address|metadata"):
            await out.post(f"http://{host}/x", {}, 5.0)


@pytest.mark.parametrize("address", PRIVATE)
async def test_a_name_of_such_an_address_is_refused(address):
    names = Names(rewards=[[address]])
    async with outbound(ALLOWED, resolver=names) as out:
        with pytest.raises(Forbidden, match=r"rewards.test is .*(no public address|metadata)"):
            await out.post(ALLOWED + "x", {}, 5.0)


async def test_one_bad_address_among_those_of_a_name_is_enough():
    names = Names(rewards=[["93.184.216.34", "127.0.0.1"]])
    async with outbound(ALLOWED, resolver=names) as out:
        with pytest.raises(Forbidden, match=r"is 127\.0\.0\.1"):
            await out.post(ALLOWED + "x", {}, 5.0)


@pytest.mark.parametrize(
    "host", ["2130706433", "127.1", "017700000001", "0x7f000001", "0x7f.1", "127.0.0.01"]
)
async def test_other_ways_to_write_an_address_are_refused(host):
    async with outbound(f"http://{host}/", allow_private=True) as out:
        with pytest.raises(Forbidden, match="no plain form"):
            await out.post(f"http://{host}/x", {}, 5.0)


@pytest.mark.parametrize("address", ["169.254.169.254", "::ffff:169.254.169.254", "fd00:ec2::254"])
async def test_metadata_services_are_refused_among_private_addresses_too(address):
    names = Names(rewards=[[address]])
    async with outbound(ALLOWED, resolver=names, allow_private=True) as out:
        with pytest.raises(Forbidden, match="metadata"):
            await out.post(ALLOWED + "x", {}, 5.0)


async def test_a_name_that_is_bound_anew_gets_nowhere(app, port):
    """The address that is called is the one that was checked, of the same look-up."""
    names = Names(rewards=[["127.0.0.1"], ["169.254.169.254"]])
    base = f"http://rewards.test:{port}/v1/"
    async with outbound(base, resolver=names, allow_private=True) as out:
        assert (await out.post(base + "echo", 1, 5.0))["body"] == 1
        assert names.asked == ["rewards.test"]
    async with outbound(base, resolver=names, allow_private=True) as out:
        with pytest.raises(Forbidden, match="metadata"):
            await out.post(base + "echo", 2, 5.0)
    assert len(app.state.calls) == 1


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("away", None, "answered 307; redirects are not followed"),
        ("answer/500", "no", r"answered 500: b'no'"),
        ("answer/201", "{}", "answered 201"),
        ("answer/200", "no", "answered with no JSON"),
        ("answer/200", '{"a": NaN}', "answered with no JSON"),
        ("answer/200", "[" * 4000, "answered with no JSON"),
        ("answer/200", "", "answered with no JSON"),
        ("endless", None, "more than 4096 bytes"),
    ],
    ids=["redirect", "500", "201", "text", "nan", "nested", "empty", "endless"],
)
async def test_an_answer_that_is_none_is_an_outage(app, port, path, body, message):
    base = f"http://127.0.0.1:{port}/v1/"
    async with outbound(base, allow_private=True, max_response_bytes=4096) as out:
        with pytest.raises(BackendError, match=message):
            await out.post(base + path, body, 5.0)
    assert app.state.calls == []


@pytest.mark.parametrize("own", [True, False], ids=["the call's", "the config's"])
async def test_a_service_that_never_answers_meets_a_limit(port, own):
    base = f"http://127.0.0.1:{port}/v1/"
    limit = 60.0 if own else 0.05
    async with outbound(base, allow_private=True, timeout_s=limit) as out:
        with pytest.raises(BackendError, match=r"did not answer within 0\.05 s"):
            await out.post(base + "never", {}, 0.05 if own else 60.0)


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_service_that_is_away_is_waited_for(app, port, status):
    base = f"http://127.0.0.1:{port}/v1/"
    app.state.statuses = [status, status]
    async with outbound(base, allow_private=True) as out:
        assert await out.post(base + "restarting", {}, 5.0) == {}
    assert app.state.statuses == []


async def test_a_call_that_is_lost_is_made_again():
    answers = [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    ]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with outbound(base, allow_private=True) as out:
            assert await out.post(base, {}, 5.0) == {}
    assert answers == []


async def test_a_service_that_stays_away_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    base = f"http://127.0.0.1:{port}/"
    async with outbound(base, allow_private=True, service_wait_s=0.05) as out:
        for _ in range(2):
            with pytest.raises(
                ServiceAway, match=r"away for 0\.\d s, outbound\.service_wait_s=0\.05"
            ):
                await out.post(base + "?key=secret", {}, 5.0)
        (away,) = out.outages.away()
    assert (away.url, away.waiting) == (base, 0)


async def test_no_cookie_is_kept(port):
    base = f"http://127.0.0.1:{port}/v1/"
    async with outbound(base, allow_private=True) as out:
        assert [await out.post(base + "cookie", {}, 5.0) for _ in range(2)] == [{}, {}]


@pytest.mark.parametrize("body", [float("nan"), {1, 2}, b""], ids=["nan", "set", "bytes"])
async def test_what_has_no_json_form_is_not_sent(body):
    async with outbound(ALLOWED) as out:
        with pytest.raises(DataError, match="no JSON form"):
            await out.post(ALLOWED, body, 5.0)


@pytest.mark.parametrize(
    "prefix",
    [
        "rewards.test",
        "ftp://rewards.test/",
        "https://",
        "https://user@rewards.test/",
        "https://rewards.test/?a=1",
        "https://rewards.test/#a",
        "https://rewards.test/a b",
        "",
    ],
)
def test_a_prefix_that_is_no_url_is_a_config_error(prefix):
    with pytest.raises(ConfigError, match=r"outbound\.allow has"):
        HttpOutbound(OutboundConfig(allow=(prefix,)))
