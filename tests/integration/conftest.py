"""Real processes on loopback: a gateway, generation servers and a trainer, each its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.model import ModelConfig
from headway.contracts.config.weight_sync import StoredSync, WeightSyncConfig
from headway.contracts.types import WeightUpdateMeta
from headway.launch.launchers.local import LocalRun
from headway.launch.quickstart import task
from headway.runtime.config import validate_config
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.processes import local_run
from weight_sync.model_dir import load_model
from weight_sync.transports.disk import make_local_publisher

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with the quick start's tokenizer."""

    scratch = tmp_path_factory.mktemp("scratch")
    task.write_model(scratch, TINY)
    model = load_model(ModelConfig(path=str(scratch), init_from_scratch=True))
    folder = tmp_path_factory.mktemp("model")
    task.write_model(folder, TINY)
    model.save_pretrained(folder)
    return folder


def run_config(
    folder: Path,
    model_dir: Path,
    steps: int = 4,
    max_staleness: int = 1,
    num_servers: int = 1,
    num_trainer_ranks: int = 1,
    every_steps: int = 2,
    resume: bool = False,
    lease_s: float = 10.0,
    num_slots: int = 64,
    **sections: Any,
) -> LaunchConfig:
    """A whole run: 4 prompts of 4 trajectories per step, responses of 12 tokens.

    Args:
        sections: of the trainer, besides those that are here.
    """
    task.write_rows(folder / "rows.jsonl", task.make_rows(64, seed=1))
    model = {"path": str(model_dir)}
    tree = {
        "num_servers": num_servers,
        "num_trainer_ranks": num_trainer_ranks,
        "threads_per_process": 1,
        "start_timeout_s": 60,
        "gateway": {
            "service": {"port": 0},
            "tokenizer": str(model_dir),
            "ledger": str(folder / "ledger.sqlite"),
            "fleet": {"lease_s": lease_s},
        },
        "server": {
            "service": {"port": 0},
            "model": model,
            "backend": {"type": "embedded_torch", "max_sequences": num_slots},
            "heartbeat_s": 0.2,
        },
        "trainer": {
            "run_dir": str(folder / "run"),
            "model": model,
            "data": {"path": str(folder / "rows.jsonl"), "batch_size": 4},
            "sampling": {"max_new_tokens": 12, "ignore_eos": True},
            "rollout": {
                "reward": {"name": "exact", "args": {"pattern": "[0-9]"}},
                "group_size": 4,
                "max_staleness": max_staleness,
                "wait_timeout_s": 90,
            },
            "weight_sync": {"type": "disk", "root": str(folder / "weights")},
            "trainer": {"total_steps": steps, "max_tokens_per_mb": 256, "num_threads": 1},
            "recovery": {"every_steps": every_steps, "mode": "auto" if resume else "disabled"},
            **sections,
        },
    }
    return validate_config(LaunchConfig, tree)


def with_weight_sync(config: LaunchConfig, sync: WeightSyncConfig) -> LaunchConfig:
    """The same run over another transport."""
    trainer = config.trainer.model_copy(update={"weight_sync": sync})
    return config.model_copy(update={"trainer": trainer})


@contextmanager
def publishing(folder: Path, model_dir: Path) -> Iterator[Callable[[int], WeightUpdateMeta]]:
    """Publishes the tiny model with its weights scaled a little, so that versions differ."""

    publisher = make_local_publisher(str(folder / "weights"), StoredSync(keep=50))
    model = load_model(ModelConfig(path=str(model_dir)))

    def publish_version(version: int) -> WeightUpdateMeta:
        scale = 1.0 + 0.05 * version
        return publisher.publish(version, ((n, p * scale) for n, p in model.named_parameters()))

    yield publish_version
    publisher.close()


@pytest.fixture
def make_config(tmp_path: Path, model_dir: Path) -> Callable[..., LaunchConfig]:
    """`run_config` below the test's own folder."""
    return partial(run_config, tmp_path, model_dir)


@pytest.fixture
def publish(tmp_path: Path, model_dir: Path) -> Iterator[Callable[[int], WeightUpdateMeta]]:
    """`publishing` below the test's own folder."""
    with publishing(tmp_path, model_dir) as publish_version:
        yield publish_version


@pytest.fixture
def start() -> Iterator[Callable[[LaunchConfig], LocalRun]]:
    """Starts gateway and servers of a run; everything is ended after the test."""
    runs: list[LocalRun] = []

    def start_services(config: LaunchConfig) -> LocalRun:
        run = local_run(config)
        runs.append(run)
        run.start_gateway()
        run.start_servers()
        return run

    yield start_services
    for run in runs:
        run.stop()


@pytest.fixture
def connect() -> Iterator[Callable[[str], RemoteInferenceEngine]]:
    """Clients that are closed after the test."""
    clients: list[RemoteInferenceEngine] = []

    def connect_to(url: str) -> RemoteInferenceEngine:
        client = RemoteInferenceEngine(url, connect_timeout_s=30.0)
        client.initialize()
        clients.append(client)
        return client

    yield connect_to
    for client in clients:
        client.destroy()
