"""Roles on any number of workers, in processes and in Ray's actors, give the numbers of one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from headway.contracts.config.sampling import SamplingConfig
from tests.numeric.engines import assert_close, plain_training
from tests.numeric.models import load_reference, reference_logprobs, save_model
from tests.numeric.worker_rows import (
    RESPONSE,
    TEMPERATURE,
    content_of,
    random_rows,
    stored_weights,
    workers_config,
)
from tests.processes import FORKS
from tests.ray_cluster import ray_cluster
from trainer.workers.data_proto import DataProto
from trainer.workers.group import WorkerGroup
from trainer.workers.padding import to_sequences
from trainer.workers.reward_worker import RewardWorker
from trainer.workers.roles import ActorRolloutRefWorker, CriticWorker

DEADLINE_S = 100.0
SIZES = (8, 7, 3, 1)
"""Rows that four workers can share equally, and that they cannot."""
ATOL = 1e-6
SETUPS = ("two", "four", "rows of two", "ray")

pytestmark = pytest.mark.extended


class RolloutOutcome(NamedTuple):
    """What a setup made of the same batches."""

    said: dict[tuple[str, int], dict[str, Tensor]]
    """By method and number of rows."""
    metrics: dict[str, dict[str, float]]
    """Of updates."""
    weights: dict[str, Tensor]
    """After the actor's."""


@pytest.fixture(scope="module")
def play(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], RolloutOutcome]]:
    """What a setup makes of the batches; each is played once."""
    folder = save_model(tmp_path_factory.mktemp("model"), "llama")
    done: dict[str, RolloutOutcome] = {}

    def of(setup: str) -> RolloutOutcome:
        if setup not in done:
            out = tmp_path_factory.mktemp("out")
            if setup == "ray":
                request.getfixturevalue("cluster")
            done[setup] = _play(setup, folder, out)
        return done[setup]

    yield of


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster():
        yield


def _open(setup: str, worker: type, *args: Any) -> WorkerGroup:
    if setup == "ray":
        return WorkerGroup.of_ray_actors(worker, 2, *args, timeout_s=DEADLINE_S)
    world_size = {"one": 1, "two": 2, "four": 4, "rows of two": 4}[setup]
    return WorkerGroup.of_processes(
        worker, world_size, *args, start_method=FORKS.get_start_method(), timeout_s=DEADLINE_S
    )


def _play(setup: str, folder: Path, out: Path) -> RolloutOutcome:
    config = workers_config(folder, shard_size=2 if setup == "rows of two" else None)
    said: dict[tuple[str, int], dict[str, Tensor]] = {}
    metrics: dict[str, dict[str, float]] = {}

    def ask(group: WorkerGroup, method: str, batch: DataProto) -> DataProto:
        before = content_of(batch)
        answer = getattr(group, method)(batch)
        assert content_of(batch) == before
        assert len(answer) == len(batch)
        assert answer.num_padding == 0
        said[method, len(batch)] = dict(answer.tensors)
        return answer

    with ExitStack() as stack:
        actor = stack.enter_context(
            _open(setup, ActorRolloutRefWorker, config, "actor_rollout_ref")
        )
        actor.init_model()
        for size in SIZES:
            ask(actor, "compute_log_prob", random_rows(size, seed=size))
            ask(actor, "compute_ref_log_prob", random_rows(size, seed=size))
        ask(actor, "generate_sequences", _prompts())
        batch = random_rows(7, seed=7).with_meta(mini_batch_size=3, epochs=2, shuffle_seed=5)
        before = content_of(batch)
        metrics["actor"] = actor.update_actor(batch)
        assert content_of(batch) == before
        actor.export_model(str(out / "exported"))
    with ExitStack() as stack:
        critic = stack.enter_context(_open(setup, CriticWorker, config))
        critic.init_model()
        for size in SIZES:
            ask(critic, "compute_values", random_rows(size, seed=size))
        batch = random_rows(7, seed=7)
        batch = batch.union(critic.compute_values(batch)).with_meta(mini_batch_size=3, epochs=2)
        metrics["critic"] = critic.update_critic(batch)
        ask(critic, "compute_values", random_rows(5, seed=5))
    with ExitStack() as stack:
        reward = stack.enter_context(_open(setup, RewardWorker, config))
        reward.init_model()
        ask(reward, "compute_rm_score", random_rows(7, seed=7))
    return RolloutOutcome(said, metrics, stored_weights(out / "exported"))


def _prompts() -> DataProto:
    rows = random_rows(5, seed=11)
    mask = rows["attention_mask"][:, : rows["prompts"].shape[1]]
    sampling = SamplingConfig(max_new_tokens=3, stop_token_ids=(1, 2, 3, 4, 5))
    return DataProto.of(
        {"sampling": sampling}, prompts=rows["prompts"], prompt_mask=mask, seeds=torch.arange(5)
    )


@pytest.mark.parametrize("setup", SETUPS)
def test_what_models_say_does_not_depend_on_the_workers(setup, play):
    one, several = play("one"), play(setup)
    assert one.said.keys() == several.said.keys()
    for call, expected in one.said.items():
        got = several.said[call]
        assert got.keys() == expected.keys(), call
        for name, column in expected.items():
            assert got[name].dtype == column.dtype
            torch.testing.assert_close(got[name], column, atol=1e-5, rtol=0, msg=f"{call} {name}")


@pytest.mark.parametrize("setup", SETUPS)
def test_updates_do_not_depend_on_the_workers(setup, play):
    one, several = play("one"), play(setup)
    assert_close(several.weights, one.weights, atol=ATOL)
    for role, expected in one.metrics.items():
        assert several.metrics[role] == pytest.approx(expected, rel=1e-5, abs=1e-6), role


def test_logprobs_are_those_of_the_model_alone(play, tmp_path):
    model = load_reference(save_model(tmp_path / "model", "llama"))
    said = play("one").said["compute_log_prob", 8]["old_log_probs"]
    batch = random_rows(8, seed=8)
    for row in range(8):
        attended = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][attended].tolist()
        length = int(batch["attention_mask"][row, -RESPONSE:].sum())
        split = len(ids) - length
        expected = torch.zeros(RESPONSE, dtype=torch.float64)
        if length:
            expected[:length] = reference_logprobs(model, ids[:split], ids[split:], TEMPERATURE)
        expected *= batch["response_mask"][row]
        torch.testing.assert_close(said[row].double(), expected, atol=2e-5, rtol=0)


def test_an_update_is_that_of_a_plain_loop(tmp_path):
    folder = save_model(tmp_path / "model", "llama")
    batch = random_rows(5, seed=1, temperature=1.0)
    model = load_reference(folder)
    expected = plain_training(model, [to_sequences(batch)])
    with _open("two", ActorRolloutRefWorker, workers_config(folder), "actor") as actor:
        actor.init_model()
        metrics = actor.update_actor(batch)
        actor.export_model(str(tmp_path / "out"))
    assert metrics["loss"] == pytest.approx(expected["losses"][0], abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected["norms"][0], rel=1e-5)
    assert_close(stored_weights(tmp_path / "out"), copy.copy(expected["parameters"]), atol=ATOL)
