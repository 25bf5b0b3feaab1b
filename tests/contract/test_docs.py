"""What the documentation says is what the code does: settings, metrics, errors, states, examples."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from headway.contracts.config.experiment import (
    DPOExperiment,
    GRPOExperiment,
    PPOExperiment,
    RWExperiment,
    SFTExperiment,
)
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.model import ModelConfig
from headway.contracts.config.ppo_code import PPOCodeExperiment, PPOMathExperiment
from headway.contracts.config.server import ServerConfig
from headway.contracts.errors import ServiceError
from headway.contracts.http.ledger import LedgerCounts
from headway.contracts.http.paths import METRICS
from headway.contracts.http.servers import ServerStatus
from headway.contracts.http.status import StatusResponse
from headway.rollout.gateway import make_gateway
from headway.rollout.ledger.transitions import NEXT_STATE
from headway.rollout.tokenizer import TextTokenizer
from headway.runtime.config import load_config
from headway.runtime.metrics import render_metrics
from headway.runtime.model_settings import describe
from headway.runtime.settings import CATALOGUE
from trainer.tracking.groups import GROUPS
from weight_sync.model_dir import load_model

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/README.md"), *ROOT.glob("*.md")]
)
EXAMPLE = ROOT / "examples" / "gsm8k"
CONFIG_OF_FILE: dict[str, type[BaseModel]] = {
    "gateway.yaml": GatewayConfig,
    "server.yaml": ServerConfig,
    "grpo.yaml": GRPOExperiment,
    "ppo.yaml": PPOExperiment,
    "run.yaml": LaunchConfig,
}
VOCABULARY = {f"w{number}": number for number in range(20)}


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def first_column(text: str, heading: str) -> list[str]:
    """What stands in backticks in the first cells of the first table after a heading."""
    table = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", text.split(heading, 1)[1], re.MULTILINE)
    assert table is not None
    cells = [line.split("|")[1] for line in table.group(1).splitlines()]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "pad_token": "w2"}'
    )
    return folder


def test_reference_is_current():
    made = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))
    assert page("reference.md") == made["render"](), "run python docs/make_reference.py"
    assert CATALOGUE.read_text(encoding="utf-8") == made["render_catalogue"](), (
        "help and completion read it: run python docs/make_reference.py"
    )


def test_help_shows_the_defaults_that_a_process_takes():
    assert any(
        line.startswith("  --service.port  (default 8000)") for line in describe(GatewayConfig)
    )
    gateway = GatewayConfig.model_validate({"tokenizer": "m", "service": {"host": "::1"}})
    server = ServerConfig.model_validate({"model": {"path": "m"}, "service": {"host": "::1"}})
    assert (gateway.service.port, server.service.port) == (8000, 8001)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.parent.name + "/" + path.name)
def test_every_file_and_link_that_a_page_names_exists(path: Path):
    text = path.read_text()
    rooms = "headway|weight_sync|inference_server|trainer|docker|docs|examples|tests"
    for name in re.findall(rf"`((?:{rooms})/[\w./-]*)`", text):
        assert (ROOT / name).exists() or name.startswith("tests/"), name
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (path.parent / link).exists(), link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.parent.name + "/" + path.name)
def test_every_heading_that_a_page_links_to_is_there(path: Path):
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", path.read_text()):
        if not link.startswith("https://"):
            assert anchor in anchors(path.parent / link if link else path), f"{link}#{anchor}"


def anchors(path: Path) -> set[str]:
    """How a page's headings are linked to, as GitHub names them."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in headings}


def test_configuration_page_names_every_section():
    listed = set(first_column(page("configuration.md"), "## Sections"))
    policies = (GRPOExperiment, PPOExperiment, PPOCodeExperiment, PPOMathExperiment)
    models = (GatewayConfig, ServerConfig, *policies, SFTExperiment, RWExperiment, DPOExperiment)
    assert listed == {name for model in models for name in model.model_fields}


def test_operations_page_lists_every_metric():
    report = ServerStatus(server_id="s", url="http://s", version=0, state="ready")
    status = StatusResponse(
        version=0,
        running=0,
        capacity=0,
        max_staleness=None,
        counts=LedgerCounts(),
        servers=[report],
    )
    lines = render_metrics(status).decode().splitlines()
    served = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    listed = first_column(page("operations.md"), "## Metrics")
    assert {name.split("{")[0] for name in listed} == served


def test_operations_page_lists_every_metric_of_a_gateway(tokenizer_dir: Path):
    config = GatewayConfig.model_validate(
        {"tokenizer": str(tokenizer_dir), "ledger": ":memory:", "sandbox": {"type": "none"}}
    )
    with TestClient(make_gateway(config)) as client:
        text = client.get(METRICS).text
    served = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    common, gateways = (
        {name.split("{")[0] for name in first_column(page("operations.md"), heading)}
        for heading in ("## Metrics", "The gateway's page has")
    )
    assert common | gateways == {name for name in served if not name.endswith("_created")}


def test_metrics_page_sorts_figures_as_sinks_do():
    headings = re.findall(r"^### (\w+)$", page("metrics.md"), re.MULTILINE)
    listed = {name: set(first_column(page("metrics.md"), f"### {name}\n")) for name in headings}
    assert listed == {
        group: set(names.split()) | ({"step"} if group == "run" else set())
        for group, names in GROUPS.items()
    }


def test_operations_page_lists_every_error_code():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (yes|no) \|", page("operations.md"), re.MULTILINE)
    listed = {code: (int(status), retryable == "yes") for code, status, retryable in rows}
    boundary = {"invalid_request": (422, False), "body_too_large": (413, False)}
    known = [ServiceError, *ServiceError._by_code.values()]
    raised = {
        error.code: (error.http_status, error.retryable)
        for error in known
        if error.__module__ == ServiceError.__module__
    }
    assert listed == boundary | raised


def test_architecture_page_lists_every_state_of_a_rollout():
    listed = first_column(page("architecture.md"), "## States of a rollout")
    assert set(listed) == set(LedgerCounts.model_fields) - {"submitted"}
    assert set(listed) == {target for _, target in NEXT_STATE.values()}


@pytest.mark.parametrize("file", sorted(EXAMPLE.glob("*.yaml")), ids=lambda file: file.name)
def test_every_example_config_loads(file: Path):
    load_config(CONFIG_OF_FILE[file.name], ["--config", str(file)])


def test_example_processes_find_one_another():
    gateway = load_config(GatewayConfig, ["--config", str(EXAMPLE / "gateway.yaml")])
    server = load_config(ServerConfig, ["--config", str(EXAMPLE / "server.yaml")])
    trainer = load_config(GRPOExperiment, ["--config", str(EXAMPLE / "grpo.yaml")])
    url = f"http://{gateway.service.host}:{gateway.service.port}"
    assert server.gateway == trainer.rollout.url == url
    assert [str(Path(root).resolve()) for root in server.weights.allow] == [
        trainer.weight_sync.origin
    ]
    assert gateway.tokenizer == server.model.path == trainer.model.path


def test_every_flag_in_the_example_commands_is_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    text = "\n".join(blocks((EXAMPLE / "README.md").read_text(), "bash"))
    commands = [line.rstrip("& ") for line in text.replace("\\\n", " ").splitlines()]
    checked = 0
    for command in commands:
        argv = shlex.split(command)
        if "--config" not in argv:
            continue
        start = argv.index("--config")
        file = ROOT / argv[start + 1]
        if file.name == "run.yaml" and not file.exists():
            continue
        load_config(CONFIG_OF_FILE[file.name], argv[start:])
        checked += 1
    assert checked >= 6


def test_tiny_model_of_the_example_loads_where_it_is_needed(tokenizer_dir: Path, tmp_path: Path):
    output = tmp_path / "model"
    make = runpy.run_path(str(EXAMPLE / "make_tiny_model.py"))["make_tiny_model"]
    make(tokenizer_dir, output)
    model = load_model(ModelConfig(path=str(output)))
    assert model.config.vocab_size == len(VOCABULARY)
    assert model.generation_config.eos_token_id == VOCABULARY["w1"]
    assert TextTokenizer(str(output)).decode([3, 4]) == "w3 w4"


PLAY = """
import sys
from headway.contracts.config.base import PartConfig
from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import FakeBackendConfig, ServerConfig
from headway.contracts.types import Prompt, RolloutRequest, WorkflowRef
from headway.rollout.tools.base import make_tool
from inference_server.engine import LocalInferenceEngine

if __name__ == "__main__":
    config = ServerConfig(
        model=ModelConfig(path=sys.argv[1]), backend=FakeBackendConfig(vocab_size=20)
    )
    engine = LocalInferenceEngine(config)
    engine.initialize()
    request = RolloutRequest(
        rollout_id="r",
        prompt=Prompt(group_id="g", group_size=2, text="w1 w2"),
        workflow=WorkflowRef(name="brief", version="1", args={"cost_per_token": 0.01}),
        reward=PartConfig(name="length", args={"words": 10}),
        filter=PartConfig(name="unanimous"),
        gconfig=SamplingConfig(max_new_tokens=10),
    )
    batch = engine.rollout([request], timeout=30.0)
    print([round(row.reward, 6) for row in batch.trajectories])
    print(make_tool(PartConfig(name="clock")).name)
    engine.destroy()
"""


def test_parts_of_the_extending_page_run_as_an_installed_package(
    tokenizer_dir: Path, tmp_path: Path
):
    text = page("extending.md")
    site = tmp_path / "site"
    info = site / "my_parts-0.1.dist-info"
    info.mkdir(parents=True)
    (site / "my_parts.py").write_text("\n\n".join(blocks(text, "python")))
    project = tomllib.loads(blocks(text, "toml")[0])["project"]
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    (tmp_path / "play.py").write_text(PLAY)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "play.py"), str(tokenizer_dir)],
        env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "[0.9, 0.9]\nclock\n", done.stderr


def test_wrong_input_ends_a_command_with_status_2(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "headway.launch.cli", "gateway", "--config", str(tmp_path / "no")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot read config file")


def test_changelog_has_unreleased_on_top():
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
