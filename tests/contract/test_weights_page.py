"""What docs/weights and examples/weights write out is accepted, fits together, and runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import TypeAdapter

from headway.contracts.config.experiment import GRPOExperiment
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.config.weight_sync import ReceiverConfig, WeightSyncConfig
from headway.runtime.config import load_config
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.process import ProcessSpec
from tests.contract.pages import ROOT, Example, examples_of, prose_of
from tests.processes import start_process
from weight_sync.manifest import MANIFEST_NAME, parse_manifest
from weight_sync.transports.base import TRANSPORTS, check_allowed

PAGES = sorted((ROOT / "docs" / "weights").glob("*.md"))
TWO_HOSTS = ROOT / "examples" / "weights" / "two_hosts"
SYNC: TypeAdapter[Any] = TypeAdapter(WeightSyncConfig)


def blocks(language: str) -> list[Example]:
    return [block for page in PAGES for block in examples_of(page, language)]


def test_every_setting_that_a_page_writes_out_loads():
    trees = [yaml.safe_load(block.text) for block in blocks("yaml")]
    trees = [tree for tree in trees if "weight_sync" in tree]
    syncs = [SYNC.validate_python(tree["weight_sync"]) for tree in trees]
    assert {sync.type for sync in syncs} == set(TRANSPORTS.names())
    pairs = [
        (sync, tree["weights"])
        for sync, tree in zip(syncs, trees, strict=True)
        if "weights" in tree
    ]
    assert {sync.type for sync, _ in pairs} == set(TRANSPORTS.names())
    for sync, weights in pairs:
        assert_takes(ReceiverConfig.model_validate(weights), sync)


def assert_takes(weights: ReceiverConfig, sync: Any) -> None:
    """A server with this section takes what such a trainer publishes."""
    origin = sync.origin + ("29500" if sync.origin.endswith(":") else "")
    check_allowed(f"{origin}/v00000001", weights.model_copy(update={"peers": False}))


def test_the_processes_of_two_hosts_find_one_another():
    gateway = load_config(GatewayConfig, ["--config", str(TWO_HOSTS / "gateway.yaml")])
    server = load_config(ServerConfig, ["--config", str(TWO_HOSTS / "server.yaml")])
    trainer = load_config(GRPOExperiment, ["--config", str(TWO_HOSTS / "trainer.yaml")])
    assert server.gateway == trainer.rollout.url == f"http://trainer:{gateway.service.port}"
    assert server.advertise_url == f"http://generator:{server.service.port}"
    assert gateway.tokenizer == server.model.path == trainer.model.path
    assert_takes(server.weights, trainer.weight_sync)
    tokens = {
        gateway.service.token_env,
        gateway.fleet.token_env,
        server.service.token_env,
        server.gateway_token_env,
        server.weights.token_env,
        trainer.rollout.token_env,
        trainer.weight_sync.token_env,
    }
    assert tokens == {"HEADWAY_TOKEN"}


class Layer(torch.nn.Module):
    """As little of a model as an adapter of two modules needs."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(24, 16, bias=False)
        self.v_proj = torch.nn.Linear(24, 16, bias=False)


@pytest.fixture
def server_url(tmp_path: Path) -> Iterator[str]:
    """A server without a model that takes versions from below the test's folder."""
    ready = tmp_path / "ready.json"
    config = {
        "service": {"port": 0, "ready_file": str(ready)},
        "model": {"path": "none"},
        "backend": {"type": "fake"},
        "weights": {"allow": [str(tmp_path)]},
    }
    file = tmp_path / "server.yaml"
    file.write_text(yaml.safe_dump(config))
    argv = [sys.executable, "-m", "inference_server", "--config", str(file)]
    process = start_process(ProcessSpec("server", argv, tmp_path / "server.log", {}, ready))
    yield process.wait_ready(60.0)
    process.stop(10.0)


def test_a_trainer_of_ones_own_publishes_a_model_and_then_an_adapter(
    server_url: str, tmp_path: Path
):
    script = "\n".join(block.text for block in blocks("python"))
    code = script.replace("http://127.0.0.1:8000", server_url)
    names: dict[str, Any] = {"model": Layer().bfloat16()}
    exec(code.replace("/shared/weights", str(tmp_path / "weights")), names)
    assert names["committed"].result() == 2
    servers: RemoteInferenceEngine = names["servers"]
    assert servers.status().version == 2
    servers.destroy()
    names["publisher"].close()
    assert_layout(tmp_path / "weights")


def assert_layout(root: Path) -> None:
    """The files that the page names are those that are there."""
    (tree,) = [block.text for block in blocks("") if ".publisher.lock" in block.text]
    named = set(re.findall(r"[\w.-]+\.(?:json|safetensors|lock)", tree))
    first = {file.name for file in (root / "v00000001").iterdir()} | {".publisher.lock"}
    assert named == first
    manifest = parse_manifest((root / "v00000002" / MANIFEST_NAME).read_text(), "the adapter")
    assert manifest.kind == "adapter" and manifest.base is not None
    said = prose_of(ROOT / "docs" / "weights" / "operate.md")
    fields = {*type(manifest).model_fields, *type(manifest.tensors[0]).model_fields}
    assert {name for name in fields if f"`{name}`" not in said} <= {"format", "tensors"}
