"""What a hostile caller tries against real services: never a defect, a hang, or a way in."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.contracts.config.gateway import INCLUDED, ROLES
from headway.contracts.errors import ErrorBody
from headway.contracts.http import paths
from tests.integration.guarded import (
    GATEWAY,
    KINDS,
    MAX_BODY_BYTES,
    SECRETS,
    SERVER,
    Guarded,
    guarded_run,
)
from tests.waiting import eventually

REFUSED = range(400, 500)
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The only folder that versions may come from, and a link in it that leads out."""
    folder = tmp_path_factory.mktemp("allowed")
    (folder / "way-out").symlink_to("/etc")
    return folder


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, weights: Path
) -> Iterator[Guarded]:
    with guarded_run(tmp_path_factory.mktemp("guarded"), model_dir, (str(weights),)) as both:
        yield both
        assert both.is_alive(), "an attack ended a service"
        for kind in KINDS:
            log = both.log(kind)
            assert not any(secret in log for secret in SECRETS.values()), "a secret was logged"
            assert "Traceback" not in log and "request crashed" not in log
            for line in log.splitlines():
                assert isinstance(json.loads(line), dict), "a line of the log was forged"


def error_of(answer: httpx.Response) -> str:
    """The code of a refusal, whichever API's words it speaks."""
    body = answer.json()
    if "code" in body:
        return ErrorBody.model_validate(body).code
    return str(body.get("error", body))


# Who comes in


def concrete(path: str) -> str:
    return path.replace("{version}", "0").replace("{", "").replace("}", "")


CLOSED = [tuple(route.split()) for route in paths.ACCESS]


@pytest.mark.parametrize("kind", KINDS)
def test_no_route_answers_without_a_token_or_with_a_lesser_one(guarded: Guarded, kind: str):
    for (method, path), role in zip(CLOSED, paths.ACCESS.values(), strict=True):
        for given in (None, *(each for each in ROLES if role not in INCLUDED[each])):
            answer = guarded.ask(kind, method, concrete(path), given)
            wanted = (401, "unauthorized") if given is None else (403, "forbidden")
            assert (answer.status_code, error_of(answer)) == wanted, (method, path, given)
            assert ("www-authenticate" in answer.headers) == (given is None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "place",
    [
        {"params": {"token": SECRETS["admin"]}},
        {"params": {"access_token": SECRETS["admin"]}},
        {"params": {"authorization": f"Bearer {SECRETS['admin']}"}},
        {"headers": {"cookie": f"authorization={SECRETS['admin']}"}},
        {"headers": {"x-api-key": SECRETS["admin"]}},
        {"headers": {"proxy-authorization": f"Bearer {SECRETS['admin']}"}},
        {"headers": {"authorization": f"Basic {SECRETS['admin']}"}},
        {"headers": {"authorization": SECRETS["admin"]}},
        {"headers": {"authorization": "Bearer null"}},
        {"headers": {"authorization": "Bearer " + "x" * 20_000}},
        {"headers": {"x-forwarded-for": "127.0.0.1", "x-original-url": "/health"}},
        {"headers": {"x-http-method-override": "GET"}},
    ],
    ids=lambda place: "-".join([*place, *next(iter(place.values()))]),
)
def test_a_token_counts_in_one_place_only(guarded: Guarded, kind: str, place: dict[str, Any]):
    answer = guarded.ask(kind, "GET", paths.STATUS, None, **place)
    assert answer.status_code == 401
    assert SECRETS["admin"] not in answer.text


def test_what_is_open_tells_nothing(guarded: Guarded):
    for kind in KINDS:
        assert guarded.ask(kind, "GET", paths.HEALTH, None).json() == {"status": "ok"}
    session = guarded.ask(GATEWAY, "GET", "/v1/sessions/none", "admin")
    assert session.status_code in (401, 404)
    for path in ("/v1/sessions/none", "/v1/sessions/../status", "/v1/sessions/%2e%2e/status"):
        answer = guarded.ask(GATEWAY, "GET", path, None)
        assert answer.status_code in (401, 404), path


# Bodies


def base_bodies() -> dict[str, dict[str, Any]]:
    """One that is taken, for the routes whose inside is worth attacking."""
    return {
        paths.GENERATE: {"rid": "a", "input_ids": [1, 2], "gconfig": {"max_new_tokens": 2}},
        paths.ROLLOUTS: {
            "rollouts": [
                {
                    "rollout_id": "a",
                    "prompt": {"group_id": "a", "text": "12", "data": {"answer": "1"}},
                    "reward": {"name": "exact", "args": {"pattern": "[0-9]"}},
                    "gconfig": {"max_new_tokens": 2},
                }
            ]
        },
        paths.COMPLETIONS: {"model": "x", "prompt": "12", "max_tokens": 2},
        paths.CHAT_COMPLETIONS: {
            "model": "x",
            "messages": [{"role": "user", "content": "12"}],
            "max_tokens": 2,
        },
        paths.SGLANG_GENERATE: {"text": "12", "sampling_params": {"max_new_tokens": 2}},
        paths.SGLANG_TOKENIZE: {"prompt": "12"},
        paths.SGLANG_DETOKENIZE: {"tokens": [1]},
        paths.SESSIONS: {"rollout_id": "s", "timeout_s": 0.0},
        paths.REWARDS_SCORE: {
            "reward": {"name": "exact", "args": {"answer_key": "answer"}},
            "answers": [
                {"prompt": "12", "completion": "1", "data": {"answer": "1"}},
                {"prompt_ids": [1, 2], "completion_ids": [1], "data": {"answer": "1"}},
            ],
        },
        paths.CONSUMER: {
            "consumer": "c",
            "batch_size": 1,
            "max_staleness": 0,
            "step": 0,
            "version": 0,
        },
    }


POISONS = {
    "deep list": "[" * 100_000,
    "deep list that ends": "[" * 100_000 + "]" * 100_000,
    "deep object": '{"a":' * 100_000,
    "infinite": "1e400",
    "minus infinite": "-1e400",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "long integer": "9" * 5000,
    "huge integer": "1" + "0" * 400,
    "lone surrogate": '"\\ud800"',
    "surrogates the wrong way": '"\\udc00\\ud800"',
    "NUL": '"a\\u0000b"',
    "long text": '"' + "x" * 500_000 + '"',
    "no text": '"\\',
    "null": "null",
    "list": "[]",
    "object": "{}",
    "negative": "-1",
    "trillion": "1000000000000",
    "true": "true",
    "template": '"{{ config.__class__.__mro__ }}"',
    "control characters": '"\\u001b[31m\\r\\nlevel: forged"',
}


def leaves(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*at, key))


def poisoned(tree: Any, at: tuple[Any, ...], poison: str) -> str:
    """The JSON of a body with a text of its own at one place."""
    if not at:
        return poison
    copy = json.loads(json.dumps(tree))
    node = copy
    for key in at[:-1]:
        node = node[key]
    node[at[-1]] = "@here@"
    return json.dumps(copy).replace('"@here@"', poison)


ON_BOTH = (
    paths.GENERATE,
    paths.ROLLOUTS,
    paths.REWARDS_SCORE,
    paths.SESSIONS,
    paths.CONSUMER,
)
ATTACKED = [
    (kind, route)
    for kind in KINDS
    for route in base_bodies()
    if (kind == SERVER or route in ON_BOTH)
    and (kind, route) not in ((SERVER, paths.SESSIONS), (SERVER, paths.CONSUMER))
]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(("kind", "route"), ATTACKED)
def test_no_value_anywhere_in_a_body_is_a_defect(
    guarded: Guarded, kind: str, route: str, poison: str
):
    body = base_bodies()[route]
    for at in leaves(body):
        content = poisoned(body, at, POISONS[poison])
        answer = guarded.ask(kind, "POST", route, content=content.encode(), headers=JSON)
        assert answer.status_code < 500, (at, answer.text[:300])
        if answer.status_code >= 400:
            assert error_of(answer)
            json.loads(answer.text, parse_constant=pytest.fail)
        if poison.startswith(
            ("deep", "NaN", "Infinity", "lone", "surrogates", "no text", "long int")
        ):
            assert answer.status_code in (400, 422), (at, answer.text[:300])


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"", JSON),
        (b"\xff\xfe\x00", JSON),
        (b"\xef\xbb\xbf{}", JSON),
        (b"{}" * 10, JSON),
        (b'{"rid": 1}', {"content-type": "text/plain"}),
        (b"rid=a&input_ids=1", {"content-type": "application/x-www-form-urlencoded"}),
        (b"\x80\x04\x95cos\nsystem\n(S'id'\ntR.", {"content-type": "application/x-python-pickle"}),
        (b"--b\r\n\r\n", {"content-type": "multipart/form-data; boundary=b"}),
        (b"\x1f\x8b\x08" + b"\0" * 64, {**JSON, "content-encoding": "gzip"}),
        (b'{"rid": "a", "rid": "b"}', JSON),
    ],
    ids=["empty", "bytes", "mark", "many", "text", "form", "pickle", "parts", "gzip", "twice"],
)
def test_what_is_no_json_object_is_refused(
    guarded: Guarded, content: bytes, headers: dict[str, str]
):
    for kind in KINDS:
        answer = guarded.ask(kind, "POST", paths.GENERATE, content=content, headers=headers)
        assert answer.status_code in (400, 422)
        assert error_of(answer) == "invalid_request"


def memory_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) << 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_huge_body_is_refused_unread(guarded: Guarded, kind: str):
    before = memory_of(guarded.pid(kind))
    address = httpx.URL(guarded.urls[kind])
    head = f"POST {paths.GENERATE} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {SECRETS['submit']}\r\n"
    announced = head + f"content-length: {300 << 20}\r\n\r\n"
    streamed = head + "transfer-encoding: chunked\r\n\r\n"
    piece = b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
    for begun in (announced, streamed):
        with socket.create_connection((address.host, address.port), timeout=20) as peer:
            peer.sendall(begun.encode())
            try:
                for _ in range(0 if begun is announced else 300 * 16):
                    peer.sendall(piece)
            except OSError:
                continue  # it was closed while this side was still sending
            assert peer.recv(16).startswith(b"HTTP/1.1 413")
    assert memory_of(guarded.pid(kind)) - before < 32 * MAX_BODY_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_service_has_the_limits_of_its_config(guarded: Guarded, kind: str):
    address = httpx.URL(guarded.urls[kind])
    with socket.create_connection((address.host, address.port), timeout=20) as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
        assert peer.recv(1) == b"", "a head that does not end is given up"
    answer = guarded.ask(kind, "GET", paths.HEALTH, headers={"x": "a" * 100_000})
    assert answer.status_code == 431


# Names that lead elsewhere

PATHS = {
    "parent": "../x",
    "parent inside": "{root}/../../etc",
    "parent encoded": "{root}/%2e%2e/etc",
    "absolute": "/etc",
    "link out": "{root}/way-out",
    "sibling with the same beginning": "{root}-other",
    "home": "~/x",
    "relative": "x",
    "file URL": "file:///etc",
    "file URL inside": "file://{root}/../../etc",
    "store": "s3://bucket/x",
    "hub": "org/name",
    "hub URL": "hf://org/name",
    "web": "http://127.0.0.1:1/v1/weights/held/1",
    "metadata": "http://169.254.169.254/latest/meta-data",
    "memory": "shm:///dev/shm/x",
    "group": "gloo://127.0.0.1:1/x",
    "device": "/dev/zero",
    "process": "/proc/self/environ",
    "NUL": "{root}/a\x00b",
    "empty": "",
    "dot": ".",
    "long": "/" + "a" * 4095,
    "newline": "{root}/a\nb",
    "unknown scheme": "pickle://x",
}


@pytest.mark.parametrize("name", PATHS)
def test_weights_come_from_nowhere_else(guarded: Guarded, weights: Path, name: str):
    path = PATHS[name].replace("{root}", str(weights))
    before = guarded.ask(SERVER, "GET", paths.STATUS).json()["version"]
    prepare = {"epoch": 1, "version": 1, "path": path, "timeout_s": 2.0}
    answers = [
        guarded.ask(SERVER, "POST", paths.WEIGHTS_PREPARE, json=prepare),
        guarded.ask(SERVER, "POST", paths.SGLANG_UPDATE_DISK, json={"model_path": path}),
    ]
    for answer in answers:
        assert answer.status_code in REFUSED, answer.text
        assert "root:" not in answer.text
    assert guarded.ask(SERVER, "GET", paths.STATUS).json()["version"] == before


@pytest.mark.parametrize(
    "blob",
    [
        "..%2f..%2fetc%2fpasswd",
        "../../../../etc/passwd",
        "%2e%2e",
        ".hidden",
        "a%00b",
        "a%0ab",
        "x" * 5000,
        "%c0%ae%c0%ae",
        "C:%5cx",
    ],
)
def test_a_server_gives_away_nothing_but_versions(guarded: Guarded, blob: str):
    for version in ("0", "-1", "1e9", "9" * 400):
        answer = guarded.ask(SERVER, "GET", f"/v1/weights/held/{version}/{blob}")
        assert answer.status_code in REFUSED


@pytest.mark.parametrize(
    "load_format", ["pt", "pickle", "dummy", "remote", "npcache", "gguf", "os.system"]
)
def test_weights_are_never_unpickled(guarded: Guarded, weights: Path, load_format: str):
    body = {"model_path": str(weights), "load_format": load_format}
    assert guarded.ask(SERVER, "POST", paths.SGLANG_UPDATE_DISK, json=body).status_code in REFUSED
    for path in ("/update_weights_from_tensor", "/start_profile"):
        assert guarded.ask(SERVER, "POST", path, json={}).status_code == 404


@pytest.mark.parametrize("path", ["/etc", "../../etc", "file:///etc", "http://127.0.0.1/x", "\0"])
def test_adapters_are_read_below_allowed_directories_only(guarded: Guarded, path: str):
    body = {"lora_name": "x", "lora_path": path}
    assert guarded.ask(SERVER, "POST", paths.SGLANG_LORA_LOAD, json=body).status_code in REFUSED
    answer = guarded.ask(SERVER, "PUT", paths.ADAPTER.format(name="x"), json={"path": path})
    assert answer.status_code in REFUSED


NAMES = [
    "subprocess.Popen",
    "os.system",
    "builtins:eval",
    "gateway.app.main:main",
    "single_turn.__class__",
    "\u0455ingle_turn",
    "single_turn\n",
    " single_turn",
    "../single_turn",
    "x" * 129,
    "",
]


@pytest.mark.parametrize("field", ["workflow", "reward", "filter"])
@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_name_of_a_part_is_looked_up_and_never_imported(guarded: Guarded, field: str, name: str):
    (rollout,) = base_bodies()[paths.ROLLOUTS]["rollouts"]
    body = {"rollouts": [{**rollout, "rollout_id": "n", field: {"name": name}}]}
    answer = guarded.ask(GATEWAY, "POST", paths.ROLLOUTS, json=body)
    assert answer.status_code in (400, 404, 422)
    assert error_of(answer) in ("unknown_name", "invalid_request")


IDENTIFIERS = [
    "{x}",
    "a b",
    "a\nb",
    "a/b",
    "\u202e",
    "a" * 129,
    "a" * 900_000,
    "*",
    "a\x00",
    "",
    "ä",
]


@pytest.mark.parametrize("name", IDENTIFIERS, ids=lambda name: repr(name[:8]))
def test_an_id_cannot_be_anything_but_an_id(guarded: Guarded, name: str):
    (rollout,) = base_bodies()[paths.ROLLOUTS]["rollouts"]
    bodies = [
        (paths.ROLLOUTS, {"rollouts": [{**rollout, "rollout_id": name}]}),
        (paths.ROLLOUTS, {"rollouts": [{**rollout, "consumer": name}]}),
        (paths.ROLLOUTS_WAIT, {"delivery_id": name, "count": 1, "timeout_s": 0}),
        (paths.ROLLOUTS_CANCEL, {"rollout_ids": [name]}),
        (paths.SERVERS, {"server_id": name, "url": "http://x", "version": 0}),
        (paths.SESSIONS, {"rollout_id": name}),
        (
            paths.CONSUMER,
            {"consumer": name, "batch_size": 1, "max_staleness": 0, "step": 0, "version": 0},
        ),
    ]
    for path, body in bodies:
        answer = guarded.ask(GATEWAY, "POST", path, json=body)
        assert (answer.status_code, error_of(answer)) == (422, "invalid_request"), path


CALLBACKS = [
    "http://127.0.0.1:1/x",
    "http://localhost/x",
    "http://169.254.169.254/latest/meta-data",
    "http://[::ffff:127.0.0.1]/x",
    "http://2130706433/x",
    "http://127.1/x",
    "http://example.com@127.0.0.1/x",
    "file:///etc/passwd",
    "gopher://127.0.0.1:25/x",
]


@pytest.mark.parametrize("url", CALLBACKS)
def test_nobody_is_called_whom_the_config_does_not_allow(guarded: Guarded, url: str):
    (rollout,) = base_bodies()[paths.ROLLOUTS]["rollouts"]
    name = "call-" + re.sub(r"[^a-z0-9]", "-", url)
    workflow = {"name": "callback", "args": {"url": url}}
    body = {"rollouts": [{**rollout, "rollout_id": name, "workflow": workflow}]}
    answer = guarded.ask(GATEWAY, "POST", paths.ROLLOUTS, "submit", json=body)
    if answer.status_code != 200:
        assert answer.status_code in REFUSED
        return
    wait = {"delivery_id": name, "count": 1, "rollout_ids": [name], "timeout_s": 30}
    ended = guarded.ask(GATEWAY, "POST", paths.ROLLOUTS_WAIT, "consume", json=wait)
    assert "may not be called" in ended.text, ended.text


def test_a_forged_heartbeat_needs_the_token_of_a_server(guarded: Guarded):
    status = guarded.ask(GATEWAY, "GET", paths.STATUS).json()
    report = {**status["servers"][0], "url": "http://127.0.0.1:1"}
    report.pop("state")
    for role in ("submit", "consume"):
        assert guarded.ask(GATEWAY, "POST", paths.SERVERS, role, json=report).status_code == 403
    after = guarded.ask(GATEWAY, "GET", paths.STATUS).json()["servers"]
    assert [one["url"] for one in after] == [guarded.urls[SERVER]]


def test_what_was_tried_can_be_read_in_the_audit(guarded: Guarded):
    name = {paths.REQUEST_ID_HEADER: "try-1"}
    assert (
        guarded.ask(GATEWAY, "POST", paths.WEIGHTS_PIN, "consume", headers=name).status_code == 403
    )

    def found() -> list[dict[str, Any]]:  # written once the answer is on its way
        lines = [json.loads(line) for line in guarded.log(GATEWAY).splitlines()]
        return [
            line
            for line in lines
            if line["logger"] == "headway.audit" and line["request_id"] == "try-1"
        ]

    eventually(lambda: bool(found()), 20, "the audit line is written")
    (line,) = found()
    assert line["message"] == "refused"
    assert line["caller"] == "of-consume"
    assert (line["asked_role"], line["route"], line["status"]) == (
        "admin",
        "POST /v1/weights/pin",
        403,
    )
    assert line["client"] == "127.0.0.1"
