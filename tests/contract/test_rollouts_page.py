"""docs/rollouts.md is true: every block runs against real processes, every table names what there is.

The page's commands are run as they stand, on free ports, with the fake backend in the place of a model:
first its services and files, then block by block what it submits. A block of JSON is an answer, compared
in its form with the real one, or a part of a rollout, which is submitted and played. The Python blocks
run as one script.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import httpx
import psutil
import pytest
import yaml

from headway.contracts.config.gateway import SandboxConfig
from headway.contracts.http import paths
from headway.contracts.registry import Registry
from headway.contracts.types import RolloutRequest, Verdict
from headway.launch.launchers.local import GRACE_S
from headway.rollout.filters.base import FILTERS, filter_schema
from headway.rollout.ledger import base as ledger
from headway.rollout.parts import args_model
from headway.rollout.rewards.base import REWARDS, reward_schema
from headway.rollout.tools.base import TOOLS
from headway.rollout.workflows.base import WORKFLOWS, get_workflow
from tests.unit.rollout.games import byte_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rollouts.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PORT = re.compile(r"\b(8[0-9]{3}|9[0-9]{3}|6379)\b")
FRAGMENT = {"workflow", "reward", "filter"}
"""A block of JSON with one of these is a part of a rollout."""
NO_DEFAULT = "\u2013"
LIMIT_S = 60.0
SHELL = """set -eu
curl() { case "$1" in *f*) command curl "$@";; *) command curl --fail-with-body "$@";; esac; }
"""
"""A request that is refused ends a block, unless it is asked until it succeeds."""
QUESTION = {
    "prompt": {
        "group_size": 2,
        "messages": [{"role": "user", "content": "What is 2 + 2?"}],
        "data": {"answer": "4"},
    },
    "reward": {"name": "exact"},
    "gconfig": {"max_new_tokens": 16},
}
"""What a part of a rollout is filled up with."""


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name that it has as a file, in its first line."""
        named = re.match(r"# (\S+\.(?:py|yaml))\n", self.text)
        return named.group(1) if named else None


@dataclass
class Shop:
    """Runs the page's blocks in a folder, on ports of its own."""

    folder: Path
    ports: dict[str, str] = field(default_factory=dict)
    output: str = ""
    """Of the last commands."""
    _groups: list[int] = field(default_factory=list)
    _submitted: int = 0

    @property
    def url(self) -> str:
        return self.moved("http://127.0.0.1:8000")

    def moved(self, text: str) -> str:
        """The same on other ports."""
        return PORT.sub(lambda m: self.ports.setdefault(m.group(), str(free_port())), text)

    def write_files(self, blocks: list[Block]) -> None:
        byte_tokenizer(self.folder / "MODEL")
        for number, block in enumerate(blocks):
            if block.file is not None:
                name = f"{number}.yaml" if block.language == "yaml" else block.file
                (self.folder / name).write_text(self.moved(block.text))

    def run(self, command: list[str]) -> None:
        """Run to its end; what it leaves running is ended by `close`."""
        log, errors = self.folder / "output", self.folder / "errors"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with log.open("wb") as output, errors.open("ab") as errors_file:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, "PATH": path, "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}"},
                stdout=output,
                stderr=errors_file,
                start_new_session=True,
            )
        self._groups.append(process.pid)
        status = process.wait(LIMIT_S)
        self.output = log.read_text()
        assert status == 0, f"{command}\n{self.output}\n{errors.read_text()}"

    def shell(self, text: str) -> None:
        configs = " ".join(f"--config {file.name}" for file in sorted(self.folder.glob("*.yaml")))
        text = text.replace("headway gateway", f"headway gateway {configs}")
        fake = "--backend.type fake --backend.vocab-size 258 --model.path MODEL"
        text = text.replace("--model.path MODEL", fake)
        self.run(["bash", "-c", SHELL + self.moved(text)])

    def compare(self, shown: Any) -> None:
        """The last commands' last answer has this form."""
        values = list(_values(self.output))
        assert values, self.output
        assert_alike(shown, values[-1])

    def play(self, part: Mapping[str, Any]) -> None:
        """Submit a rollout with this part, and wait for its end."""
        self._submitted += 1
        name = f"part-{self._submitted}"
        whole = {"rollout_id": name, "prompt": {"group_id": name}}
        for tree in (QUESTION, json.loads(self.moved(json.dumps(part)))):
            _merge(whole, tree)
        answer = httpx.post(self.url + paths.ROLLOUTS, json={"rollouts": [whole]}, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        wait = {"delivery_id": name, "count": 1, "rollout_ids": [name], "timeout_s": LIMIT_S}
        answer = httpx.post(self.url + paths.ROLLOUTS_WAIT, json=wait, timeout=2 * LIMIT_S)
        is_filtered = "filter" in part and f"{name!r} is filtered" in answer.text
        assert answer.status_code == 200 or is_filtered, (part, answer.text)

    def close(self) -> None:
        """End what was started, and see that nothing is left."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            left = [p for p in psutil.process_iter() if _group_of(p) in self._groups]
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(sent)
            psutil.wait_procs(left, GRACE_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def _values(text: str) -> Iterator[Any]:
    decoder, at = json.JSONDecoder(), 0
    while (start := text.find("{", at)) >= 0:
        value, at = decoder.raw_decode(text, start)
        yield value


def _merge(target: dict[str, Any], given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, Mapping) and isinstance(target.get(name), dict) and name != "reward":
            _merge(target[name], value)
        else:
            target[name] = json.loads(json.dumps(value))


def assert_alike(shown: Any, real: Any, place: str = "answer") -> None:
    """The same fields with values of the same kinds."""
    if isinstance(shown, dict):
        assert isinstance(real, dict) and (shown.keys() == real.keys() or not shown), place
        for name, value in shown.items():
            assert_alike(value, real[name], f"{place}.{name}")
    elif isinstance(shown, list):
        assert isinstance(real, list), place
        for one in real[:1] if shown else []:
            assert_alike(shown[0], one, f"{place}[0]")
    elif isinstance(shown, float | int) and not isinstance(shown, bool):
        assert isinstance(real, float | int) and not isinstance(real, bool), place
    else:
        assert type(shown) is type(real), place


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path)
    yield shop
    shop.close()


def blocks() -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(PAGE)]


@pytest.mark.timeout(240)
def test_every_block_of_the_page_runs(shop: Shop):
    shop.write_files(blocks())
    script = ""
    for block in blocks():
        match block.language:
            case "bash":
                shop.shell(block.text)
            case "python" if block.file is None:
                script += block.text
            case "json" if FRAGMENT & (part := json.loads(block.text)).keys():
                shop.play(part)
            case "json":
                shop.compare(json.loads(block.text))
            case "yaml" if block.file is None:
                assert "**Untested**" in PAGE.partition(block.text)[0][-200:]
                assert all(tree["apiVersion"] for tree in yaml.safe_load_all(block.text))
    script += "import json; print(json.dumps([ended, ended_too]))"
    shop.run([sys.executable, "-c", shop.moved(script)])
    games = [{"rollout_id": name, "state": "ready"} for name in ("game-1", "game-2")]
    assert json.loads(shop.output) == games
    audit = httpx.get(shop.url + paths.LEDGER).json()
    assert (audit["lost"], audit["duplicated"], audit["counts"]["failed"]) == (0, 0, 0)


def table(start: str) -> dict[str, list[str]]:
    """The first table from a text on: what stands in backticks in its first cells -> the other cells."""
    text = PAGE[PAGE.index(start) :]
    found = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found is not None
    rows: dict[str, list[str]] = {}
    for line in found.group(1).splitlines():
        first, *others = [cell.strip() for cell in line.strip("|").split(" | ")]
        rows |= {name: others for name in re.findall(r"`([^`]+)`", first)}
    return rows


def test_the_table_of_a_request_names_its_fields():
    assert table("## A request").keys() == RolloutRequest.model_fields.keys()


def test_the_routes_are_there_and_ask_for_the_roles_that_the_page_says():
    rows = table("## Routes")
    assert {route: cells[0] for route, cells in rows.items()}.items() <= paths.ACCESS.items()
    prefixes = (
        paths.ROLLOUTS,
        paths.SESSIONS,
        paths.WORKFLOWS,
        paths.REWARDS,
        paths.FILTERS,
        paths.TOOLS,
    )
    wanted = {route for route in paths.ACCESS if route.partition(" ")[2].startswith(prefixes)}
    assert wanted <= rows.keys()


def test_the_states_are_drawn_as_in_the_code():
    drawing = PAGE.split("## States", 1)[1].split("```", 2)[1].strip("\n")
    assert drawing in (inspect.getdoc(ledger) or "")


@pytest.mark.parametrize(
    ("heading", "registry"),
    [
        ("## Workflows", WORKFLOWS),
        ("## Rewards", REWARDS),
        ("## Filters", FILTERS),
        ("| tool | does", TOOLS),
    ],
    ids=["workflow", "reward", "filter", "tool"],
)
def test_every_part_is_in_its_table(heading: str, registry: Registry[Any]):
    assert table(heading).keys() == registry._targets.keys()


@pytest.mark.parametrize("name", ["multi_turn", "tool_use", "callback", "session"])
def test_the_arguments_of_a_workflow_are_listed_with_their_defaults(name: str):
    heading = "workflow `session` and `agent_url`" if name == "session" else f"\n**`{name}`**"
    fields = get_workflow(name).Args.model_fields
    rows = table(heading)
    assert rows.keys() == fields.keys()
    for argument, (default, *_) in rows.items():
        shown = fields[argument]
        if shown.is_required():
            assert default == NO_DEFAULT
        elif default != "none":
            assert _is_said(shown.default, default), (argument, default)
        else:
            assert shown.default is None


def _is_said(value: Any, cell: str) -> bool:
    said = [part.strip("`") for part in cell.split(", ")]
    if isinstance(value, str):
        return any(value.startswith(part.rstrip("…")) for part in said)
    return yaml.safe_load(said[0]) == value


PARTS = [
    *(("## Rewards", name, reward_schema(name)) for name in sorted(REWARDS._targets)),
    *(("## Filters", name, filter_schema(name)) for name in sorted(FILTERS._targets)),
    *(
        ("| tool | does", name, args_model(TOOLS.get(name)).model_json_schema())
        for name in sorted(TOOLS._targets)
    ),
]


@pytest.mark.parametrize(("heading", "name", "schema"), PARTS, ids=[part[1] for part in PARTS])
def test_every_argument_of_a_part_stands_in_its_row(
    heading: str, name: str, schema: dict[str, Any]
):
    row = " ".join(table(heading)[name])
    assert [argument for argument in schema["properties"] if f"`{argument}`" not in row] == []


def test_every_verdict_is_explained():
    assert table("### Verdicts").keys() == set(get_args(Verdict))


def test_every_type_of_sandbox_is_explained():
    types = get_args(SandboxConfig.model_fields["type"].annotation)
    assert set(table("`sandbox.type`:")) == set(types)
