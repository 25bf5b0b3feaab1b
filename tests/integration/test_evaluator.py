"""One evaluation against real services over the fake backend, without a trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headway.contracts.config.evaluation import EvaluationConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import NotFound, RolloutsFailed, WaitTimeout
from headway.contracts.types import WeightUpdateMeta
from headway.launch.launchers.local import LocalRun
from headway.launch.launchers.preload import child_environment
from headway.runtime.config import dump_yaml, validate_config
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.process import ProcessSpec
from tests.processes import start_process
from trainer.evaluation.evaluator import EvaluationTarget, Evaluator

Start = Callable[[LaunchConfig], LocalRun]
Configure = Callable[..., LaunchConfig]
MakeEvaluator = Callable[..., Evaluator]
FIRST = EvaluationTarget("run", step=0, version=0)


@pytest.fixture
def config(make_config: Configure) -> LaunchConfig:
    """A gateway and one server whose tokens take no time."""
    one = make_config(num_servers=1)
    server = one.server.model_copy(update={"backend": FakeBackendConfig()})
    return one.model_copy(update={"server": server})


@pytest.fixture
def make_evaluator(config: LaunchConfig) -> Iterator[MakeEvaluator]:
    """Evaluators of five prompts of the training data, two samples each; closed after the test."""
    with ExitStack() as stack:

        def make(url: str, **changed: Any) -> Evaluator:
            tree = {
                "data": {"path": config.trainer.data.path},
                "limit": 5,
                "num_samples": 2,
                "max_concurrent": 8,
                "sampling": {"temperature": 1.0},
                **changed,
            }
            client = RemoteInferenceEngine(url, connect_timeout_s=30.0)
            evaluator = Evaluator(client, validate_config(EvaluationConfig, tree), config.trainer)
            stack.callback(evaluator.close)
            return evaluator

        yield make


@pytest.fixture
def lone_url(config: LaunchConfig, tmp_path: Path) -> Iterator[str]:
    """A server without a gateway."""
    file, ready = tmp_path / "server.yaml", tmp_path / "server.ready.json"
    server = config.server.model_copy(
        update={
            "service": config.server.service.model_copy(update={"ready_file": str(ready)}),
            "weights": ReceiverConfig(allow=(config.trainer.weight_sync.origin,)),
        }
    )
    file.write_text(dump_yaml(server))
    argv = [sys.executable, "-m", "inference_server", "--config", str(file)]
    log = tmp_path / "server.log"
    process = start_process(ProcessSpec("server", argv, log, child_environment(1), ready))
    yield process.wait_ready(60)
    process.stop(15)


def states_of(client: RemoteInferenceEngine) -> set[str]:
    return {view.summary.state for view in map(client.get, ids())}


def ids() -> list[str]:
    return [f"{FIRST.name}.{row}" for row in range(5)]


def test_an_evaluation_played_twice_is_the_same_one(
    config: LaunchConfig, start: Start, make_evaluator: MakeEvaluator
) -> None:
    run = start(config)
    evaluator = make_evaluator(run.url)
    first = evaluator.run(FIRST)
    again = make_evaluator(run.url).run(FIRST)  # as a trainer that was killed before it wrote
    assert {**first, "seconds": 0.0} == {**again, "seconds": 0.0}
    assert (first["num_prompts"], first["num_samples"]) == (5, 10)
    client = RemoteInferenceEngine(run.url)
    assert states_of(client) == {"delivered"}
    for _ in range(2):
        evaluator.settle(FIRST, is_kept=True)
        assert states_of(client) == {"consumed"}
    assert client.audit().counts.submitted == 10
    client.destroy()


def test_what_was_missed_is_cancelled(
    config: LaunchConfig, start: Start, make_evaluator: MakeEvaluator
) -> None:
    run = start(config)
    never = {"name": "exact", "args": {"answer_key": "not there"}}
    evaluator = make_evaluator(run.url, reward=never)
    with pytest.raises(RolloutsFailed, match="not there"):
        evaluator.run(FIRST)
    evaluator.settle(FIRST, is_kept=False)
    client = RemoteInferenceEngine(run.url)
    open_states = ("queued", "leased", "ready", "delivered")
    assert all(getattr(client.status().counts, state) == 0 for state in open_states)
    client.destroy()


def test_a_version_that_was_never_published_is_not_found(
    config: LaunchConfig, start: Start, make_evaluator: MakeEvaluator
) -> None:
    run = start(config)
    with pytest.raises(NotFound, match="version 9 is not kept"):
        make_evaluator(run.url).run(EvaluationTarget("run", step=9, version=9))


def test_an_evaluation_ends_at_its_time(
    config: LaunchConfig, start: Start, make_evaluator: MakeEvaluator
) -> None:
    slow = config.server.model_copy(update={"backend": FakeBackendConfig(token_latency_s=3.0)})
    run = start(config.model_copy(update={"server": slow}))
    with pytest.raises((WaitTimeout, RolloutsFailed), match=r"timeout_s=0\.5"):
        make_evaluator(run.url, timeout_s=0.5).run(FIRST)


def test_one_server_alone_evaluates_what_it_serves_and_nothing_else(
    lone_url: str, make_evaluator: MakeEvaluator, publish: Callable[[int], WeightUpdateMeta]
) -> None:
    assert make_evaluator(lone_url).run(FIRST)["num_prompts"] == 5
    client = RemoteInferenceEngine(lone_url)
    assert client.update_weights(publish(1)).result(30) == 1
    client.destroy()
    with pytest.raises(RolloutsFailed, match=r"version 1 serves, versions\.max_version=0"):
        make_evaluator(lone_url).run(EvaluationTarget("later", step=0, version=0))
