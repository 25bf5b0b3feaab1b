"""Processes die or hang in the middle; nothing is lost, nothing is counted twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.errors import ErrorBudgetExceeded
from headway.contracts.types import WeightUpdateMeta
from headway.launch.launchers.local import LocalRun
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.builders import generation, rollout
from tests.processes import local_run
from tests.waiting import eventually

LONG_RUN = ("test_a_broken_reward_ends_the_wait_with_its_reason[tries_every_way_to_match]",)


Start = Callable[[LaunchConfig], LocalRun]
Connect = Callable[[str], RemoteInferenceEngine]
Publish = Callable[[int], WeightUpdateMeta]


def running_on(client: RemoteInferenceEngine) -> int:
    """Sequences that the servers reported as running."""
    return sum(server.running for server in client.status().servers if server.state == "ready")


def test_rollouts_of_a_killed_server_are_played_by_its_successor(
    make_config: Callable[..., LaunchConfig], start: Start, connect: Connect
) -> None:
    run = start(make_config())
    client = connect(run.url)
    names = [f"r{n}" for n in range(12)]
    client.submit([rollout(name, max_new_tokens=200, group_size=4) for name in names])
    eventually(lambda: running_on(client) > 0, 30, "the server is generating")
    os.kill(run.process("server-0").pid, signal.SIGKILL)
    eventually(lambda: run.process("server-0").exit_code() is not None, 10, "the server is dead")
    run.watch()  # starts it again
    batch = client.wait(len(names), timeout=90)
    assert batch.rollout_ids == names
    audit = client.audit()
    assert (audit.lost, audit.duplicated) == (0, 0)
    assert audit.requeues == 0  # the fleet restarts what was running there: no attempt is spent
    assert audit.counts.delivered == 48


def test_a_server_that_hangs_loses_its_requests_to_another(
    make_config: Callable[..., LaunchConfig], start: Start, connect: Connect
) -> None:
    run = start(make_config(num_servers=2, lease_s=2.0))
    client = connect(run.url)
    eventually(
        lambda: [s.state for s in client.status().servers] == ["ready", "ready"], 20, "both ready"
    )
    names = [f"r{n}" for n in range(12)]
    client.submit([rollout(name, max_new_tokens=150, group_size=4) for name in names])
    eventually(lambda: running_on(client) > 0, 30, "the servers are generating")
    os.kill(run.process("server-0").pid, signal.SIGSTOP)
    try:
        batch = client.wait(len(names), timeout=90)
    finally:
        os.kill(run.process("server-0").pid, signal.SIGCONT)
    assert batch.rollout_ids == names
    audit = client.audit()
    assert (audit.lost, audit.duplicated) == (0, 0)
    eventually(
        lambda: [s.state for s in client.status().servers] == ["ready", "ready"], 20, "it returned"
    )


def test_a_killed_gateway_finds_its_rollouts_in_the_ledger(
    make_config: Callable[..., LaunchConfig], start: Start, connect: Connect, publish: Publish
) -> None:
    run = start(make_config())
    client = connect(run.url)
    client.update_weights(publish(1)).result(30)
    names = [f"r{n}" for n in range(8)]
    client.submit([rollout(name, max_new_tokens=150, group_size=4) for name in names])
    eventually(lambda: client.status().running > 0, 30, "rollouts are in play")
    os.kill(run.process("gateway").pid, signal.SIGKILL)
    eventually(lambda: run.process("gateway").exit_code() is not None, 10, "the gateway is dead")
    run.watch()  # starts it again, on the same port
    batch = client.wait(len(names), timeout=90)
    assert batch.rollout_ids == names
    assert client.status().version == 1
    audit = client.audit()
    assert (audit.lost, audit.duplicated) == (0, 0)


async def test_weights_change_under_running_requests(
    make_config: Callable[..., LaunchConfig], start: Start, connect: Connect, publish: Publish
) -> None:
    run = start(make_config(num_slots=4))
    client = connect(run.url)
    tasks = [asyncio.create_task(client.agenerate(generation(f"g{n}", 240))) for n in range(16)]
    for version in range(1, 6):
        update = client.update_weights(publish(version))
        assert await asyncio.wrap_future(update) == version
    responses = await asyncio.gather(*tasks)
    await client.aclose()
    for response in responses:
        versions = response.output_versions
        assert len(versions) == 240
        assert versions == sorted(versions)
        assert response.version_runs[0][1] == 0
        assert response.version_runs[-1][2] == 240
    assert any(len(response.version_runs) > 1 for response in responses)
    status = client.status()
    assert status.updates == 5
    assert status.updates_in_flight > 0


def test_a_late_server_has_the_committed_version_before_it_takes_traffic(
    make_config: Callable[..., LaunchConfig], start: Start, connect: Connect, publish: Publish
) -> None:
    run = start(make_config())
    client = connect(run.url)
    eventually(lambda: client.status().servers != [], 20, "the first server is here")
    client.update_weights(publish(1)).result(30)
    client.update_weights(publish(2)).result(30)
    late = local_run(make_config())
    try:
        late.url = run.url
        late.start_servers()
        eventually(
            lambda: [(s.state, s.version) for s in client.status().servers] == [("ready", 2)] * 2,
            30,
            "both servers serve version 2",
        )
    finally:
        late.stop()


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (ComponentConfig(name="exact", args={"answer_key": "nobody_has_it"}), "has no field"),
        (
            ComponentConfig(name="exact", args={"pattern": r"^([0-9;]+)+x$"}),
            "took longer than 1 s of CPU",
        ),
    ],
    ids=["raises", "tries_every_way_to_match"],
)
def test_a_broken_reward_ends_the_wait_with_its_reason(
    make_config: Callable[..., LaunchConfig],
    start: Start,
    connect: Connect,
    reward: ComponentConfig,
    reason: str,
) -> None:
    config = make_config()
    executor = config.gateway.executor.model_copy(update={"error_budget": 2, "reward_workers": 2})
    gateway = config.gateway.model_copy(update={"executor": executor})
    run = start(config.model_copy(update={"gateway": gateway}))
    client = connect(run.url)
    client.submit(
        [rollout(f"r{n}", max_new_tokens=60, group_size=1, reward=reward) for n in range(5)]
    )
    with pytest.raises(ErrorBudgetExceeded, match=reason):
        client.wait(5, timeout=60)
    assert client.audit().counts.ready == 0
