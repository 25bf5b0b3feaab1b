"""`headway engine check`: what it takes for an engine, and how it tells what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from headway.contracts.errors import ConfigError
from headway.runtime.command import CommandFailed
from inference_server import engine_check
from inference_server.engine_check import check_engine, find_engine
from inference_server.engine_suite import Engine
from inference_server.engine_suite import TestEngine as Suite

URL = "http://engine:1"
PAGE = Path(__file__).parents[3] / "docs" / "servers" / "engines.md"
Serve = Callable[[dict[str, Any]], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Let URL answer these paths with JSON, text, or an error."""
    client = httpx.Client

    def answers(pages: dict[str, Any]) -> None:
        def answer(request: httpx.Request) -> httpx.Response:
            page = pages.get(request.url.path)
            if isinstance(page, Exception):
                raise page
            if isinstance(page, str):
                return httpx.Response(200, text=page)
            return httpx.Response(404) if page is None else httpx.Response(200, json=page)

        transport = httpx.MockTransport(answer)
        monkeypatch.setattr(httpx, "Client", partial(client, transport=transport))

    return answers


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("page", ["/model_info", "/get_model_info"])
def test_sglang_is_found_with_its_model(serve: Serve, model: Path, page: str) -> None:
    serve({page: {"model_path": str(model)}})
    assert find_engine(URL, None, None) == Engine("sglang", URL, model.resolve(), None)


def test_vllm_is_found_with_its_model(serve: Serve, model: Path) -> None:
    serve({"/v1/models": {"data": [{"owned_by": "vllm", "root": str(model)}]}})
    assert find_engine(URL, None, 0.1) == Engine("vllm", URL, model.resolve(), 0.1)


def test_a_model_of_another_machine_is_named_by_its_caller(serve: Serve, model: Path) -> None:
    serve({"/model_info": {"model_path": "org/name"}})
    with pytest.raises(
        ConfigError, match=r"its model from org/name, where there is no config\.json"
    ):
        find_engine(URL, None, None)
    assert find_engine(URL, model, None).model == model.resolve()


@pytest.mark.parametrize(
    "pages",
    [
        {},
        {"/model_info": "<html>", "/v1/models": []},
        {"/v1/models": {"data": [{"owned_by": "somebody", "root": "/"}]}},
        {"/v1/models": {"data": None}},
    ],
)
def test_anything_else_is_refused(serve: Serve, pages: dict[str, Any]) -> None:
    serve(pages)
    with pytest.raises(ConfigError, match=f"answers at {URL} is neither SGLang nor vLLM"):
        find_engine(URL, None, None)


def test_nothing_at_all_is_said(serve: Serve) -> None:
    serve({"/model_info": httpx.ConnectError("refused")})
    with pytest.raises(ConfigError, match=f"nothing answers at {URL}: refused"):
        find_engine(URL, None, None)


def report(name: str, outcome: str, **fields: Any) -> Any:
    plain = {"when": "call", "user_properties": [], "longrepr": None}
    place = ("suite.py", 1, f"TestEngine.{name}")
    return SimpleNamespace(outcome=outcome, location=place, **plain | fields)


def test_a_line_per_promise_and_a_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
) -> None:
    crash = SimpleNamespace(reprcrash=SimpleNamespace(message="AssertionError: 5 tokens\nmore"))
    reports = [
        report("test_logprobs", "passed", user_properties=[("remark", "error 1e-5")]),
        report("test_one", "passed", when="setup"),
        report("test_a_pause[keep]", "failed", longrepr=crash),
        report("test_a_drain", "skipped", longrepr=("f", 1, "Skipped: it follows none")),
    ]

    def run(arguments: list[str], plugins: list[Any]) -> None:
        for one in reports:
            plugins[0].pytest_runtest_logreport(one)

    monkeypatch.setattr(engine_check.pytest, "main", run)
    monkeypatch.setattr(engine_check, "find_engine", lambda *_: Engine("vllm", URL, model, None))
    with pytest.raises(CommandFailed, match=f"vllm at {URL} does not keep all"):
        check_engine(URL, None, None, None)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "ok        logprobs: error 1e-5",
        "FAILED    a pause: keep: AssertionError: 5 tokens",
        "left out  a drain: it follows none",
        "1 hold, 1 do not, 1 left out",
    ]
    reports[2:3] = []
    check_engine(URL, None, None, None, tmp_path / "results.json")
    told = json.loads((tmp_path / "results.json").read_text())
    assert (told["engine"], len(told["promises"])) == ("vllm", 2)
    assert told["promises"][0] == {"promise": "logprobs", "mark": "ok", "remark": "error 1e-5"}
    reports[:] = []  # it ran nothing
    with pytest.raises(CommandFailed):
        check_engine(URL, None, None, None)


def test_the_table_in_the_docs_has_the_promises_of_the_suite() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    promises = {row.split(":")[0].strip() for row in rows[1:]}
    tests = [name.removeprefix("test_") for name in dir(Suite) if name.startswith("test_")]
    assert promises == {name.replace("_", " ") for name in tests}, "run make engines-table"
