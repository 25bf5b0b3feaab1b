"""Every YAML file that ships is a configuration that loads; nothing is skipped."""

from pathlib import Path

import pytest
import yaml

from headway.contracts.config.base import Config
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import ServerConfig
from headway.runtime.config import dump_yaml, load_config
from trainer.experiments.base import EXPERIMENTS

ROOT = Path(__file__).parents[2]
FILES = [
    file
    for folder in ("examples", "docker")
    for pattern in ("*.yaml", "*.yml")
    for file in sorted((ROOT / folder).rglob(pattern))
]
FOREIGN_KEYS = {"services", "apiVersion"}
"""Compose files and Kubernetes manifests."""


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
