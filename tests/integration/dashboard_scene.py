"""A gateway and storytelling servers, each a process, and a trainer without a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from headway.contracts.config.base import ComponentConfig, WorkflowRef
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.config.weight_sync import StoredSync
from headway.contracts.types import ConsumerSpec, Prompt, RolloutRequest
from headway.runtime.config import dump_yaml, validate_config
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.process import Process, ProcessSpec
from tests.integration.storyteller import chat, problem, write_model
from tests.processes import start_process
from weight_sync.channel import WeightPublisher
from weight_sync.transports.disk import make_local_publisher

START_S = 60.0
WAIT_S = 60.0
GRACE_S = 5.0
TOKEN_ENV = "HEADWAY_STAGE_TOKEN"
GATEWAY = ["-m", "headway.launch.cli", "gateway"]
SERVER = ["-m", "tests.integration.storyteller"]
CALCULATOR = WorkflowRef(name="tool_use", args={"tools": [{"name": "calculator"}]})
REWARD = ComponentConfig(name="exact", args={"pattern": r"#### (-?\d+)"})


@dataclass
class Stage:
    """What is running, and the hands of a trainer."""

    url: str
    client: RemoteInferenceEngine
    publisher: WeightPublisher
    batch: int = 4
    """Groups per step."""
    group_size: int = 4
    version: int = 0
    step: int = -1
    submitted: int = 0

    def attach(self, max_staleness: int) -> None:
        """Begin to train."""
        spec = ConsumerSpec(
            "trainer", self.batch * self.group_size, max_staleness, self.step, self.version
        )
        self.client.attach(spec)

    def submit(self, count: int) -> None:
        """Further word problems."""
        requests = []
        for number in range(self.submitted, self.submitted + count):
            question, answer = problem(number)
            prompt = chat(question, f"train-{number:05d}", self.group_size, answer=str(answer))
            requests.append(self.request(f"train-{number:05d}", prompt))
        self.client.submit(requests)
        self.submitted += count

    def request(self, name: str, prompt: Prompt, **fields: Any) -> RolloutRequest:
        """A rollout with the calculator."""
        return RolloutRequest(
            rollout_id=name,
            consumer="trainer",
            prompt=prompt,
            workflow=CALCULATOR,
            reward=REWARD,
            gconfig=SamplingConfig(max_new_tokens=400),
            **fields,
        )

    def train(self) -> None:
        """One step: wait, consume, publish."""
        batch = self.client.wait(self.batch, WAIT_S)
        self.step += 1
        self.client.consumed(batch.rollout_ids, self.step, max(-1, self.step - 50))
        self.publish()

    def publish(self) -> None:
        """A further version; it holds a number that nobody looks at."""
        self.version += 1
        weights = {"step": torch.full((64,), float(self.version))}
        meta = self.publisher.publish(self.version, weights.items())
        self.client.update_weights(meta).result(WAIT_S)


@contextmanager
def staged(
    folder: Path, num_servers: int = 1, token_latency_s: float = 0.002, token: str | None = None
) -> Iterator[Stage]:
    """Everything up, and ended afterwards.

    Args:
        token: what the gateway asks for; None asks for nothing.
    """
    model = str(write_model(folder / "model"))
    weights = folder / "weights"
    token_env = None if token is None else TOKEN_ENV
    env = {"OMP_NUM_THREADS": "1"} | ({} if token is None else {TOKEN_ENV: token})
    gateway = validate_config(
        GatewayConfig,
        {
            "service": {
                "port": 0,
                "ready_file": str(folder / "gateway.json"),
                "token_env": token_env,
            },
            "tokenizer": model,
            "ledger": str(folder / "ledger.sqlite"),
        },
    )
    with ExitStack() as stack:
        url = _start(stack, folder, "gateway", GATEWAY, gateway, env).wait_ready(START_S)
        servers = []
        for number in range(num_servers):
            name = f"server-{number}"
            server = validate_config(
                ServerConfig,
                {
                    "service": {"port": 0, "ready_file": str(folder / f"{name}.json")},
                    "model": {"path": model},
                    "backend": {"type": "fake", "token_latency_s": token_latency_s},
                    "gateway": url,
                    "gateway_token_env": token_env,
                    "heartbeat_s": 0.5,
                    "weights": {"allow": [str(weights)]},
                },
            )
            servers.append(_start(stack, folder, name, SERVER, server, env))
        for process in servers:
            process.wait_ready(START_S)
        client = RemoteInferenceEngine(url, token=token)
        stack.callback(client.destroy)
        publisher = make_local_publisher(str(weights), StoredSync(keep=50))
        stack.callback(publisher.close)
        yield Stage(url, client, publisher)


def _start(
    stack: ExitStack,
    folder: Path,
    name: str,
    command: list[str],
    config: BaseModel,
    env: dict[str, str],
) -> Process:
    file = folder / f"{name}.yaml"
    file.write_text(dump_yaml(config))
    argv = [sys.executable, *command, "--config", str(file)]
    ready_file = folder / f"{name}.json"
    process = start_process(ProcessSpec(name, argv, folder / f"{name}.log", env, ready_file))
    stack.callback(process.stop, GRACE_S)
    return process
