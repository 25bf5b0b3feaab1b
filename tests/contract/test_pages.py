"""What every page shows is there: links, files, commands, flags, settings, routes, metrics, imports."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from headway.contracts.http import paths
from headway.runtime.settings import CATALOGUE, settings_of
from tests.contract.page_commands import check_commands
from tests.contract.page_settings import check_settings, is_foreign
from tests.contract.pages import (
    CHANGELOG,
    PAGES,
    ROOT,
    Example,
    anchors_of,
    examples_of,
    name_of,
    prose_of,
)

ROOMS = "headway|gateway|weight_sync|inference_server|trainer|docker|docs|examples|tests|benchmarks"
ROUTE = re.compile(r"`(?:(GET|POST|PUT|DELETE) )?(/v1/[\w/{}-]*)`")
CODE = ("headway", "gateway", "weight_sync", "inference_server", "trainer")
FILES = {"json", "jsonl", "md", "py", "yaml"}
of_every_page = pytest.mark.parametrize("page", [*PAGES, CHANGELOG], ids=name_of)


def examples(*languages: str) -> list[Example]:
    return [example for page in PAGES for example in examples_of(page, *languages)]


@of_every_page
def test_every_file_and_link_that_a_page_names_exists(page: Path):
    text = page.read_text()
    for name in re.findall(rf"`((?:{ROOMS})/[\w./-]*)`", text):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@of_every_page
def test_no_page_installs_headway_from_an_index(page: Path):
    assert not re.search(r"pip install\W*headway", page.read_text())


@of_every_page
def test_every_heading_that_a_page_links_to_is_there(page: Path):
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        if not link.startswith("https://"):
            assert anchor in anchors_of(page.parent / link if link else page), f"{link}#{anchor}"


@pytest.mark.parametrize("example", examples("bash"), ids=str)
def test_every_command_that_a_page_shows_is_understood(example: Example):
    check_commands(example.text)


@pytest.mark.parametrize(
    "command",
    [
        "headway gatewy",
        "headway gateway --service.prt 8000",
        "headway ledger show r --legder x",
        "python -m inference_server --model.path M --backend.type vlm",
        "python examples/no_such_file.py",
        "make no-such-target",
        'pip install "headway-rl[no-such-extra]"',
        "curl http://127.0.0.1:8000/v1/no/such/route",
        "sleep 1 && a-program-of-nobody",
    ],
)
def test_a_command_that_is_not_there_is_told(command: str):
    with pytest.raises((AssertionError, click.UsageError)):
        check_commands(command)


@pytest.mark.parametrize("example", examples("yaml"), ids=str)
def test_every_setting_that_a_page_shows_exists(example: Example):
    for tree in yaml.safe_load_all(example.text):
        if not is_foreign(tree):
            check_settings(tree)


@pytest.mark.parametrize("example", examples("python"), ids=str)
def test_everything_that_a_page_imports_is_there(example: Example):
    for node in ast.walk(ast.parse(example.text)):
        if isinstance(node, ast.ImportFrom):
            module = import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                import_module(name.name)


@pytest.mark.parametrize("example", examples("json", "toml"), ids=str)
def test_data_that_a_page_shows_can_be_read(example: Example):
    read: Any = json.loads if example.language == "json" else tomllib.loads
    assert read(example.text)


@of_every_page
def test_every_route_that_a_page_names_is_served(page: Path):
    served = {tuple(route.split()) for route in paths.ACCESS}
    known = {path for _, path in served} | {paths.SESSION_OPENAI, paths.SESSION_ANTHROPIC}
    known |= {paths.SESSION_END, paths.SESSION, "/v1/messages"}
    below = (paths.SESSION_PATHS, paths.UI)
    for method, path in ROUTE.findall(page.read_text()):
        alike = [route for route in known if _is_alike(path, route)]
        assert alike or path.startswith(below), f"no route {path}"
        if method and not path.startswith(below):
            assert any((method, route) in served for route in alike), f"no route {method} {path}"


def _is_alike(path: str, route: str) -> bool:
    """Names of placeholders may differ."""
    pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(route))
    return re.fullmatch(pattern, path.rstrip("/") or path) is not None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_dotted_setting_that_a_page_names_exists(page: Path):
    known = setting_paths()
    sections = {path.partition(".")[0] for path in known if "." in path}
    for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", prose_of(page)):
        section, suffix = name.partition(".")[0], name.rpartition(".")[2]
        if section in sections and suffix not in FILES and not is_module(name):
            assert any(path == name or path.startswith(f"{name}.") for path in known), name


def is_module(name: str) -> bool:
    """Whether it is one of the packages' modules."""
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def setting_paths() -> set[str]:
    """Dotted paths of all settings; those of a run's processes below their sections, too."""
    own = {row["path"] for row in json.loads(CATALOGUE.read_text())["settings"]}
    return own | {setting.path for setting in settings_of("run")}


@cache
def literals() -> str:
    """All of the packages' text, with adjoining strings joined and on one line."""
    files = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in files))
    return re.sub(r"\s+", " ", joined)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_message_that_a_page_quotes_is_one_of_the_program(page: Path):
    text = page.read_text()
    prose = re.sub(r"`[^`]*`", "", prose_of(page))
    quoted = re.findall(r'"([A-Za-z][^"]* [^"]*)"', re.sub(r"\s+", " ", prose))
    quoted += re.findall(r'"(?:reason|message)": "([^"{}…]+ [^"{}…]+)"[,}]', text)
    chosen = re.findall(r'"reason": "([^"]+)"', "".join(e.text for e in examples_of(page, "bash")))
    for message in quoted:
        assert message in chosen or message in literals(), f"nothing says {message!r}"
