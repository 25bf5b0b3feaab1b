"""Servers that are full, drain, swap or want a token; real processes over the fake backend.

Its tokens take a fixed time each, so that requests are in flight for as long as a test needs.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.errors import Draining, ServiceError
from headway.contracts.http.status import StatusResponse
from headway.contracts.types import LLMResponse, TrajectoryBatch, WeightUpdateMeta
from headway.launch.launchers.local import LocalRun
from headway.runtime.command import EXIT_INTERRUPTED
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.builders import generation, rollout
from tests.waiting import eventually

pytestmark = pytest.mark.extended

LATENCY_S = 0.01
LONG = 20_000
TOKENS = {"HEADWAY_TEST_GATEWAY": "gate-token", "HEADWAY_TEST_SERVER": "server-token"}

Make = Callable[..., LaunchConfig]
Start = Callable[[LaunchConfig], LocalRun]
Connect = Callable[..., RemoteInferenceEngine]
Publish = Callable[[int], WeightUpdateMeta]


def fake_servers(config: LaunchConfig, drain_timeout_s: float = 5.0, **server: Any) -> LaunchConfig:
    """The same run with servers that need no model."""
    service = config.server.service.model_copy(update={"drain_timeout_s": drain_timeout_s})
    backend = FakeBackendConfig(token_latency_s=LATENCY_S)
    update = {"backend": backend, "service": service, **server}
    return config.model_copy(update={"server": config.server.model_copy(update=update)})


def generate(url: str, name: str, max_new_tokens: int) -> Future[LLMResponse]:
    """One generation on a thread of its own; daemonic, so that a failed test ends."""
    future: Future[LLMResponse] = Future()

    async def ask() -> LLMResponse:
        client = RemoteInferenceEngine(url)
        try:
            return await client.agenerate(generation(name, max_new_tokens))
        finally:
            await client.aclose()
            client.destroy()

    def run() -> None:
        try:
            future.set_result(asyncio.run(ask()))
        except ServiceError as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def is_running(client: RemoteInferenceEngine) -> bool:
    return client.status().servers[0].running > 0


def states(status: StatusResponse) -> list[str]:
    return sorted(server.state for server in status.servers)


def lengths(batch: TrajectoryBatch) -> set[int]:
    return {int(trajectory.loss_mask.sum()) for trajectory in batch.trajectories}


def test_a_drained_server_hands_its_sequences_to_another(
    make_config: Make, start: Start, connect: Connect
) -> None:
    run = start(fake_servers(make_config(num_servers=2), drain_timeout_s=0.5))
    client = connect(run.url)
    eventually(lambda: states(client.status()) == ["ready"] * 2, 20, "both ready")
    names = [f"r{n}" for n in range(8)]
    client.submit([rollout(name, max_new_tokens=400) for name in names])
    eventually(
        lambda: all(server.running > 0 for server in client.status().servers), 30, "both busy"
    )
    run.process("server-0").signal(signal.SIGTERM)
    eventually(lambda: "draining" in states(client.status()), 10, "the gateway knows of the drain")
    batch = client.wait(len(names), timeout=60)
    assert batch.rollout_ids == names
    assert lengths(batch) == {400}
    for trajectory in batch.trajectories:
        assert (trajectory.logprobs[trajectory.loss_mask] == -1.0).all()
    audit = client.audit()
    assert (audit.lost, audit.requeues, audit.counts.failed) == (0, 0, 0)
    assert run.process("server-0").wait(20) == EXIT_INTERRUPTED
    assert "requests are ended early" in run.process("server-0").spec.log.read_text()


def test_what_ends_within_the_drain_ends_whole_and_the_rest_comes_back_partial(
    make_config: Make, start: Start, connect: Connect
) -> None:
    run = start(fake_servers(make_config(), drain_timeout_s=3.0))
    server = run.process("server-0")
    url = server.wait_ready(5)
    client = connect(url)
    long = generate(url, "long", LONG)
    eventually(lambda: is_running(client), 20, "it is generating")
    short = generate(url, "short", 100)
    eventually(lambda: client.status().servers[0].running == 2, 20, "both are generating")
    server.signal(signal.SIGTERM)
    eventually(lambda: states(client.status()) == ["draining"], 10, "it drains")
    with pytest.raises(Draining):
        generate(url, "late", 1).result(20)
    assert short.result(20).stop_reason == "length"
    partial = long.result(20)
    assert partial.stop_reason == "interrupt"
    assert len(partial.output_logprobs) == len(partial.output_tokens) > 100
    assert server.wait(20) == EXIT_INTERRUPTED


def test_a_second_signal_ends_a_drain_at_once(
    make_config: Make, start: Start, connect: Connect
) -> None:
    run = start(fake_servers(make_config(), drain_timeout_s=600.0))
    server = run.process("server-0")
    url = server.wait_ready(5)
    client = connect(url)
    long = generate(url, "long", LONG)
    eventually(lambda: is_running(client), 20, "it is generating")
    server.signal(signal.SIGTERM)
    eventually(lambda: states(client.status()) == ["draining"], 10, "it drains")
    server.signal(signal.SIGTERM)
    assert server.wait(15) == EXIT_INTERRUPTED
    with pytest.raises(ServiceError):
        long.result(20)


def test_full_servers_make_rollouts_wait_and_not_fail(
    make_config: Make, start: Start, connect: Connect
) -> None:
    run = start(fake_servers(make_config(num_servers=2), max_in_flight=3))
    client = connect(run.url)
    names = [f"r{n}" for n in range(8)]
    client.submit([rollout(name, max_new_tokens=20) for name in names])
    batch = client.wait(len(names), timeout=60)
    assert batch.rollout_ids == names
    assert lengths(batch) == {20}
    audit = client.audit()
    assert (audit.requeues, audit.counts.failed) == (0, 0)


def test_an_update_that_aborts_is_survived_by_rollouts_and_seen_by_direct_callers(
    make_config: Make, start: Start, connect: Connect, publish: Publish
) -> None:
    run = start(fake_servers(make_config()))
    client = connect(run.url)
    client.submit([rollout("r", max_new_tokens=300)])
    direct = generate(run.url, "direct", LONG)
    eventually(lambda: client.status().generated_tokens > 30, 30, "all are generating")
    eventually(lambda: client.status().servers[0].running == 3, 10, "all are generating")
    assert client.update_weights(publish(1), policy="abort").result(30) == 1
    partial = direct.result(20)
    assert (partial.rid, partial.stop_reason) == ("direct", "interrupt")
    assert set(partial.output_versions) == {0}
    batch = client.wait(1, timeout=60)
    assert lengths(batch) == {300}
    for trajectory in batch.trajectories:
        versions = trajectory.versions[trajectory.loss_mask].tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
    assert client.audit().requeues == 0


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headway.launch.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, **env},
    )


def test_tokens_from_end_to_end(
    make_config: Make, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, token in TOKENS.items():
        monkeypatch.setenv(variable, token)
    gateway_variable, server_variable = TOKENS
    config = fake_servers(make_config())
    gateway_service = config.gateway.service.model_copy(update={"token_env": gateway_variable})
    server_service = config.server.service.model_copy(update={"token_env": server_variable})
    run = start(
        config.model_copy(
            update={
                "gateway": config.gateway.model_copy(update={"service": gateway_service}),
                "server": config.server.model_copy(update={"service": server_service}),
            }
        )
    )
    client = RemoteInferenceEngine(run.url, 30.0, token=TOKENS[gateway_variable])
    client.initialize()
    batch = client.rollout([rollout("r", max_new_tokens=5)], timeout=60)
    assert lengths(batch) == {5}
    client.destroy()
    known = command("status", run.url, "--token-env", gateway_variable)
    assert known.returncode == 0, known.stderr
    assert re.search(r"^\S+ +ready +0 ", known.stdout, re.MULTILINE), known.stdout
    server_url = run.process("server-0").wait_ready(5)
    for url in (run.url, server_url):
        stranger = command("status", url)
        assert stranger.returncode == 1
        assert "error [unauthorized]" in stranger.stderr
    wrong = command("status", server_url, "--token-env", gateway_variable)
    assert "a wrong token" in wrong.stderr
    written = "".join(f.read_text() for f in Path(config.trainer.run_dir).rglob("*") if f.is_file())
    assert not any(token in written for token in TOKENS.values()), "a secret reached a file"


def test_a_variable_that_is_not_set_ends_a_service_at_its_start(model_dir: Path) -> None:
    os.environ.pop("HEADWAY_TEST_UNSET", None)
    flags = ("--service.port", "0", "--service.token-env", "HEADWAY_TEST_UNSET")
    gateway = command("gateway", "--tokenizer", str(model_dir), "--ledger", ":memory:", *flags)
    server = command("serve", "--model.path", str(model_dir), "--backend.type", "fake", *flags)
    for done in (gateway, server):
        assert done.returncode == 2
        assert "token_env names HEADWAY_TEST_UNSET, which is not set" in done.stderr
