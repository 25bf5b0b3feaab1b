"""`headway engine check`: find out what runs at a URL, run the suite on it, print a line per promise."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import httpx
import pytest

from headway.contracts.errors import ConfigError
from headway.runtime.command import CommandFailed
from inference_server import engine_suite
from inference_server.engine_suite import Engine, TestEngine

ASK_TIMEOUT_S = 10.0
MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "left out"}


class Result(NamedTuple):
    """What came of one promise."""

    promise: str
    mark: str
    remark: str


def check_engine(
    url: str,
    model: Path | None,
    scratch: Path | None,
    tolerance: float | None,
    json_file: Path | None = None,
) -> None:
    """Print what holds and what does not.

    Args:
        json_file: gets the same as a JSON object.
    Raises:
        ConfigError: neither SGLang nor vLLM answers there, or its model is not here.
        CommandFailed: a promise is not kept.
    """
    engine = find_engine(url.rstrip("/"), model, tolerance)
    click.echo(f"{engine.kind} at {engine.url}, model {engine.model}")
    TestEngine.engine = engine
    results = Results()
    options = [
        "-p",
        "no:asyncio",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:terminal",
        "--import-mode=importlib",
    ]
    config = ["-c", "/dev/null", "--rootdir", str(Path(engine_suite.__file__).parent)]
    previous, tempfile.tempdir = tempfile.tempdir, str(scratch) if scratch else tempfile.tempdir
    try:
        pytest.main([*options, *config, engine_suite.__file__], plugins=[results])
    finally:
        tempfile.tempdir = previous
    count = Counter(result.mark for result in results.found)
    if json_file is not None:
        report = {
            "engine": engine.kind,
            "url": engine.url,
            "promises": [r._asdict() for r in results.found],
        }
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    click.echo(f"{count['ok']} hold, {count['FAILED']} do not, {count['left out']} left out")
    if count["FAILED"] or not count["ok"]:
        raise CommandFailed(
            f"{engine.kind} at {engine.url} does not keep all that rollouts rely on"
        )


def find_engine(url: str, model: Path | None, tolerance: float | None) -> Engine:
    """Ask what runs at a URL, and where its model is.

    Raises:
        ConfigError: neither SGLang nor vLLM, or its model is not a directory here.
    """
    with httpx.Client(timeout=ASK_TIMEOUT_S) as client:
        try:
            sglang = _json_of(client, f"{url}/model_info") or _json_of(
                client, f"{url}/get_model_info"
            )
            vllm = None if "model_path" in sglang else _json_of(client, f"{url}/v1/models")
        except httpx.HTTPError as error:
            raise ConfigError(f"nothing answers at {url}: {error}") from error
    if vllm is None:
        kind, found = "sglang", str(sglang["model_path"])
    else:
        cards = [card for card in vllm.get("data") or () if card.get("owned_by") == "vllm"]
        if not cards:
            raise ConfigError(f"what answers at {url} is neither SGLang nor vLLM")
        kind, found = "vllm", str(cards[0].get("root"))
    folder = model or Path(found)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"the engine has its model from {found}, where there is no config.json; name a directory "
            "with the same weights by --model"
        )
    return Engine(kind, url, folder.resolve(), tolerance)


def _json_of(client: httpx.Client, url: str) -> dict[str, Any]:
    """Return an answer, or nothing if it is none that was asked for."""
    response = client.get(url)
    try:
        content = response.json() if response.is_success else {}
    except ValueError:
        content = {}
    return content if isinstance(content, dict) else {}


class Results:
    """A pytest plugin that prints a line per test, and remembers what it said."""

    def __init__(self) -> None:
        self.found: list[Result] = []

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        """Let the collected class check the same engine, under whatever name it was imported."""
        for item in items:
            if isinstance(item, pytest.Function) and item.cls is not None:
                item.cls.engine = getattr(TestEngine, "engine", None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print it once it is over."""
        if report.when != "call" and report.outcome == "passed":
            return
        name = report.location[2].split(".")[-1].removeprefix("test_").replace("_", " ")
        name = name.replace("[", ": ").removesuffix("]")
        result = Result(name, MARKS[report.outcome], _remark(report))
        self.found.append(result)
        remark = f": {result.remark}" if result.remark else ""
        click.echo(f"{result.mark:8}  {result.promise}{remark}")


def _remark(report: pytest.TestReport) -> str:
    remark = dict(report.user_properties).get("remark")
    if report.outcome == "passed":
        return str(remark or "")
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).splitlines()
    return lines[0] if lines else "no reason was given"
