"""Every YAML file that ships is a configuration that loads; so is what the pages on servers start."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from headway.contracts.config.base import Config
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import ServerConfig
from headway.launch.launchers.placement import place
from headway.runtime.config import dump_yaml, load_config
from headway.runtime.gpus import Gpu, GpuSurvey
from trainer.experiments.base import EXPERIMENTS

ROOT = Path(__file__).parents[2]
FILES = [
    file
    for folder in ("examples", "docker")
    for pattern in ("*.yaml", "*.yml")
    for file in sorted((ROOT / folder).rglob(pattern))
    if file.parent.name != "templates"  # of Helm: no YAML before it has rendered them
]
FOREIGN_KEYS = {"services", "apiVersion", "groups", "scrape_configs", "networkPolicy"}
"""Compose files, a chart and its values, Prometheus."""
SERVER_PAGES = [ROOT / "docs" / "servers" / "run.md", ROOT / "examples" / "servers" / "README.md"]
START = "python -m inference_server "


def model_of(tree: dict) -> type[Config]:
    """Which process reads such a file."""
    if "type" in tree:
        return EXPERIMENTS.get(tree["type"]).config
    if {"gateway", "server", "trainer"} <= tree.keys():
        return LaunchConfig
    if "tokenizer" in tree:
        return GatewayConfig
    return ServerConfig


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_shipped_file_loads(file):
    documents = [tree for tree in yaml.safe_load_all(file.read_text()) if tree is not None]
    if all(FOREIGN_KEYS & tree.keys() for tree in documents):
        return  # not ours to check beyond its syntax
    (tree,) = documents
    model = model_of(tree)
    config = load_config(model, ["--config", str(file)])
    assert type(config).model_validate(yaml.safe_load(dump_yaml(config))) == config


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_shipped_file_says_no_key_twice(file):
    yaml.compose_all(file.read_text())
    for node in yaml.compose_all(file.read_text()):
        assert not list(repeated_keys(node))


def repeated_keys(node):
    """YAML takes the last of two equal keys without a word."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        yield from {key for key in keys if keys.count(key) > 1}
        for _, value in node.value:
            yield from repeated_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from repeated_keys(value)


def blocks(file: Path, language: str) -> list[str]:
    """What stands in a page's fences of this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", file.read_text(), re.MULTILINE | re.DOTALL)


def server_commands(file: Path) -> list[list[str]]:
    """The arguments of each generation server that a page starts."""
    text = "\n".join(blocks(file, "bash")).replace("\\\n", " ")
    lines = [line.removeprefix(START) for line in text.splitlines() if line.startswith(START)]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("file", SERVER_PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_server_that_a_page_starts_understands_its_flags(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = server_commands(file)
    assert commands
    for argv in commands:
        load_config(ServerConfig, argv)


def test_every_server_that_the_page_on_servers_writes_out_loads():
    trees = [yaml.safe_load(block) for block in blocks(SERVER_PAGES[0], "yaml")]
    kinds = {ServerConfig.model_validate(tree).backend.type for tree in trees}
    assert "sglang" in kinds


def test_there_is_an_example_of_every_kind_of_server():
    folder = ROOT / "examples" / "servers"
    loaded = {
        file.stem: load_config(ServerConfig, ["--config", str(file)]).backend.type
        for file in folder.glob("*.yaml")
    }
    assert loaded == {"embedded": "embedded_torch", "sglang": "sglang", "vllm": "vllm"}


GSM8K = ROOT / "examples" / "gsm8k"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_run_on_an_engine_trains_as_the_one_without(engine):
    """Only the servers, their place and the type of published weights differ."""
    own = load_config(LaunchConfig, ["--config", str(GSM8K / f"run_{engine}.yaml")])
    plain = load_config(LaunchConfig, ["--config", str(GSM8K / "run.yaml")])
    differing = {"run_dir", "weight_sync"}
    assert own.trainer.model_dump(exclude=differing) == plain.trainer.model_dump(exclude=differing)
    assert own.server.backend.type == engine
    assert own.trainer.run_dir != plain.trainer.run_dir
    assert own.gateway.ledger != plain.gateway.ledger


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_run_on_an_engine_takes_two_gpus_or_shares_one(engine):
    argv = ["--config", str(GSM8K / f"run_{engine}.yaml")]
    config = load_config(LaunchConfig, argv)
    placed = place(config, machine(2), {}).devices
    assert (len(placed["trainer"]), len(placed["server-0"])) == (1, 1)
    assert placed["trainer"] != placed["server-0"]
    shared = load_config(LaunchConfig, [*argv, "--share-gpus", "true"])
    assert place(shared, machine(1), {}).devices["server-0"]


def machine(num_gpus: int) -> GpuSurvey:
    gpus = tuple(Gpu(f"GPU-{n}f", "NVIDIA H100", 80 << 30, (9, 0)) for n in range(num_gpus))
    return GpuSurvey("580.95.05", (13, 0), gpus, num_gpus)
