"""Tables of the documentation list what the code has: settings, metrics, errors. Shipped examples work.

On which page a table stands, and below which heading, is no matter.
"""

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

from gateway.app.main import make_gateway
from gateway.ledger.transitions import NEXT_STATE
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
from headway.contracts.config.ppo_hybrid import PPOHybridExperiment
from headway.contracts.config.server import FakeBackendConfig, ServerConfig
from headway.contracts.errors import ServiceError
from headway.contracts.http.ledger import LedgerCounts
from headway.contracts.http.paths import METRICS
from headway.contracts.http.servers import ServerStatus
from headway.contracts.http.status import StatusResponse
from headway.runtime.config import load_config
from headway.runtime.metrics import render_metrics
from headway.runtime.model_settings import describe
from headway.runtime.settings import CATALOGUE
from headway.text.tokenizer import TextTokenizer
from inference_server.app import make_app
from inference_server.engine import make_generator
from tests.contract.pages import ROOT, examples_of, table_of, tables
from trainer.tracking.groups import GROUPS
from weight_sync.model_dir import load_model

EXAMPLE = ROOT / "examples" / "gsm8k"
CONFIG_OF_FILE: dict[str, type[BaseModel]] = {
    "gateway.yaml": GatewayConfig,
    "server.yaml": ServerConfig,
    "grpo.yaml": GRPOExperiment,
    "ppo.yaml": PPOExperiment,
    "run.yaml": LaunchConfig,
    "run_sglang.yaml": LaunchConfig,
    "run_vllm.yaml": LaunchConfig,
}
VOCABULARY = {f"w{number}": number for number in range(20)}


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
    assert (ROOT / "docs" / "reference.md").read_text() == made["render"](), (
        "run python docs/make_reference.py"
    )
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


def test_every_section_is_in_a_table():
    policies = (GRPOExperiment, PPOExperiment, PPOCodeExperiment, PPOMathExperiment)
    policies = (*policies, PPOHybridExperiment)
    models = (GatewayConfig, ServerConfig, *policies, SFTExperiment, RWExperiment, DPOExperiment)
    assert table_of({name for model in models for name in model.model_fields})


def test_every_metric_is_in_a_table_and_no_other(tokenizer_dir: Path):
    report = ServerStatus(server_id="s", url="http://s", version=0, state="ready")
    status = StatusResponse(
        version=0,
        running=0,
        capacity=0,
        max_staleness=None,
        counts=LedgerCounts(),
        servers=[report],
    )
    served = metrics_in(render_metrics(status).decode()) | metrics_of_gateway(tokenizer_dir)
    served |= metrics_of_server()
    rows = {name.partition("{")[0] for table in tables() for name in table}
    listed = {name for name in rows if name.startswith("headway_")}
    assert listed == served


def metrics_of_gateway(tokenizer_dir: Path) -> set[str]:
    folder = str(tokenizer_dir)
    memory = {"ledger": ":memory:", "sandbox": {"type": "none"}}
    config = GatewayConfig.model_validate({"tokenizer": folder, "follow": folder, **memory})
    with TestClient(make_gateway(config)) as client:
        return metrics_in(client.get(METRICS).text)


def metrics_of_server() -> set[str]:
    config = ServerConfig(model=ModelConfig(path="unused"), backend=FakeBackendConfig())
    with TestClient(make_app(config, make_generator(config))) as client:
        return metrics_in(client.get(METRICS).text)


def metrics_in(text: str) -> set[str]:
    """Names of a page of metrics."""
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    return {name for name in names if not name.endswith("_created")}


@pytest.mark.parametrize("group", GROUPS)
def test_metrics_of_a_run_are_in_tables_by_the_groups_of_sinks(group: str):
    assert table_of(set(GROUPS[group].split()) | ({"step"} if group == "run" else set()))


def test_every_error_code_is_in_a_table_with_its_status():
    known = [ServiceError, *ServiceError._by_code.values()]
    raised = {
        error.code: [str(error.http_status), "yes" if error.retryable else "no"]
        for error in known
        if error.__module__ == ServiceError.__module__
    }
    raised |= {"invalid_request": ["422", "no"], "body_too_large": ["413", "no"]}
    rows = table_of(set(raised))
    assert {code: cells[:2] for code, cells in rows.items()} == raised


def test_every_state_of_a_rollout_is_in_a_table():
    states = set(LedgerCounts.model_fields) - {"submitted"}
    assert states == {target for _, target in NEXT_STATE.values()}
    assert table_of(states)


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
    text = "\n".join(block.text for block in examples_of(EXAMPLE / "README.md", "bash"))
    commands = [line.rstrip("& ") for line in text.replace("\\\n", " ").splitlines()]
    checked = 0
    for command in commands:
        argv = shlex.split(command, comments=True)
        if "--config" not in argv:
            continue
        start = argv.index("--config")
        file = ROOT / argv[start + 1]
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
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.ppo_hybrid import PPOHybridExperiment
from headway.contracts.config.server import FakeBackendConfig, ServerConfig
from headway.contracts.config.base import WorkflowRef
from headway.contracts.types import Prompt, RolloutRequest
from gateway.tools.base import make_tool
from inference_server.app import LocalInferenceEngine

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
        reward=ComponentConfig(name="length", args={"words": 10}),
        filter=ComponentConfig(name="unanimous"),
        gconfig=SamplingConfig(max_new_tokens=10),
    )
    batch = engine.rollout([request], timeout=30.0)
    print([round(row.reward, 6) for row in batch.trajectories])
    again = RolloutRequest(
        rollout_id="again",
        prompt=Prompt(group_id="again", text="w1 w2", data={"answer": "none of these"}),
        workflow=WorkflowRef(name="persistent", args={"max_turns": 2}),
        reward=ComponentConfig(name="exact"),
        gconfig=SamplingConfig(max_new_tokens=10),
    )
    (row,) = engine.rollout([again], timeout=30.0).trajectories
    print(len(row.turns), row.turns[0].reward, row.turns[0].note["reply"])
    print(make_tool(ComponentConfig(name="clock")).name)
    engine.destroy()
"""


def test_parts_of_the_extending_page_run_as_an_installed_package(
    tokenizer_dir: Path, tmp_path: Path
):
    page = ROOT / "docs" / "extending.md"
    site = tmp_path / "site"
    info = site / "my_parts-0.1.dist-info"
    info.mkdir(parents=True)
    (site / "my_parts.py").write_text(
        "\n\n".join(block.text for block in examples_of(page, "python"))
    )
    project = tomllib.loads(examples_of(page, "toml")[0].text)["project"]
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
    assert done.stdout == "[0.9, 0.9]\n2 0.0 Wrong. Try again.\nclock\n", done.stderr


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
