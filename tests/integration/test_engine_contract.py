"""One contract: the same suite in this process, against one server, and against a gateway."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.engines import InferenceEngine
from headway.contracts.errors import (
    Conflict,
    DataError,
    NotEnoughWork,
    RequestTooLong,
    SyncError,
    UnknownName,
    WaitTimeout,
)
from headway.contracts.http.rewards import AnswerToScore
from headway.contracts.types import ConsumerSpec, TrajectoryBatch, WeightUpdateMeta
from headway.launch.launchers.preload import child_environment
from headway.runtime.config import dump_yaml
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.process import ProcessSpec
from inference_server.app import LocalInferenceEngine
from tests.integration.builders import EXACT, generation, rollout
from tests.integration.conftest import publishing, run_config
from tests.processes import local_run, start_process


@dataclass
class Served:
    """An engine and the publisher of its weights; shared by the tests of this module."""

    engine: InferenceEngine
    publish: Callable[[int], WeightUpdateMeta]
    version: int = 0
    names: int = 0

    def name(self, text: str) -> str:
        """A rollout id that no other test uses."""
        self.names += 1
        return f"{text}-{self.names}"


@pytest.fixture(params=["in_process", "server", "gateway"], scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    config = run_config(folder, model_dir)
    weights = ReceiverConfig(allow=(str(folder / "weights"),))
    alone = config.server.model_copy(update={"weights": weights})
    with ExitStack() as stack:
        engine: InferenceEngine
        if request.param == "in_process":
            engine = LocalInferenceEngine(alone)
        elif request.param == "server":
            url = stack.enter_context(running(folder, alone))
            engine = RemoteInferenceEngine(url, connect_timeout_s=30.0)
        else:
            run = stack.enter_context(local_run(config))
            run.start_gateway()
            run.start_servers()
            engine = RemoteInferenceEngine(run.url, connect_timeout_s=30.0)
        engine.initialize()
        yield Served(engine, stack.enter_context(publishing(folder, model_dir)))
        engine.destroy()


@contextmanager
def running(folder: Path, config: ServerConfig) -> Iterator[str]:
    """A generation server without a gateway, in a process of its own; its URL."""
    ready = folder / "server.ready.json"
    service = config.service.model_copy(update={"ready_file": str(ready)})
    file = folder / "server.yaml"
    file.write_text(dump_yaml(config.model_copy(update={"service": service})))
    argv = [sys.executable, "-m", "inference_server", "--config", str(file)]
    spec = ProcessSpec("server", argv, folder / "server.log", child_environment(1), ready)
    process = start_process(spec)
    try:
        yield process.wait_ready(60)
    finally:
        process.stop(10)


def sampled_versions(batch: TrajectoryBatch) -> set[int]:
    return {v for t in batch.trajectories for v in t.versions[t.loss_mask].tolist()}


async def test_generates(served: Served) -> None:
    engine = served.engine
    response = await engine.agenerate(generation("g", 20))
    assert len(response.output_tokens) == len(response.output_logprobs) == 20
    assert response.output_versions == [served.version] * 20
    assert response.stop_reason == "length"
    if isinstance(engine, RemoteInferenceEngine):
        await engine.aclose()


def test_plays_groups_in_order_of_submission(served: Served) -> None:
    long, *short = names = [served.name("order") for _ in range(3)]
    handles = served.engine.submit([rollout(long, 30), *(rollout(name, 2) for name in short)])
    assert [handle.is_new for handle in handles] == [True, True, True]
    batch = served.engine.wait(3, timeout=30)
    assert batch.rollout_ids == names
    assert [len(group.trajectories) for group in batch.groups] == [2, 2, 2]
    assert sampled_versions(batch) == {served.version}
    for trajectory in batch.trajectories:
        assert trajectory.loss_mask.sum() == (30 if trajectory.rollout_id == long else 2)
        assert set(trajectory.versions[~trajectory.loss_mask]) == {-1}
        assert trajectory.reward in (0.0, 1.0)


def test_submission_is_idempotent(served: Served) -> None:
    name = served.name("same")
    assert served.engine.submit([rollout(name)])[0].is_new
    assert not served.engine.submit([rollout(name)])[0].is_new
    with pytest.raises(Conflict, match="other content"):
        served.engine.submit([rollout(name, max_new_tokens=3)])
    assert served.engine.wait(1, timeout=30).rollout_ids == [name]
    with pytest.raises(WaitTimeout, match="0 of 1"):
        served.engine.wait(1, timeout=0.2)


def test_rollout_returns_exactly_its_own(served: Served) -> None:
    other, mine = served.name("other"), served.name("mine")
    served.engine.submit([rollout(other)])
    assert served.engine.rollout([rollout(mine)], timeout=30).rollout_ids == [mine]
    assert served.engine.wait(1, timeout=30).rollout_ids == [other]


def test_names_and_arguments_are_checked_at_submission(served: Served) -> None:
    with pytest.raises(UnknownName, match="did you mean 'exact'"):
        served.engine.submit([rollout(served.name("bad"), reward=ComponentConfig(name="exect"))])


def test_answers_are_scored_outside_of_rollouts(served: Served) -> None:
    sampled = served.engine.rollout([rollout(served.name("scored"))], timeout=30).trajectories
    answers = [
        AnswerToScore(
            prompt_ids=tuple(row.input_ids[~row.loss_mask].tolist()),
            completion_ids=tuple(row.input_ids[row.loss_mask].tolist()),
            data={"answer": "1"},
        )
        for row in sampled
    ]
    answers += [AnswerToScore(completion=text, data={"answer": "1"}) for text in ("1", "2")]
    results = served.engine.score(EXACT, answers)
    assert [r.score for r in results] == [*(row.reward for row in sampled), 1.0, 0.0]
    assert [r.verdict for r in results[:2]] == [row.verdict for row in sampled]
    wrong = [*answers, AnswerToScore(completion="1")]
    with pytest.raises(DataError, match=f"answer {len(answers)}: "):
        served.engine.score(EXACT, wrong)
    kept = served.engine.score(EXACT, wrong, failed_score=-1.0)
    assert kept[:-1] == results
    assert (kept[-1].score, set(kept[-1].details)) == (-1.0, {"error"})
    with pytest.raises(UnknownName, match="did you mean 'exact'"):
        served.engine.score(ComponentConfig(name="exect"), answers)
    assert served.engine.score(EXACT, []) == []


def test_a_prompt_beyond_the_context_is_refused_at_submission(served: Served) -> None:
    with pytest.raises(RequestTooLong, match="exceed the context of 256"):
        served.engine.submit([rollout(served.name("long"), max_new_tokens=1000)])


def test_a_new_version_samples_after_it_is_committed(served: Served) -> None:
    served.version += 1
    update = served.engine.update_weights(served.publish(served.version))
    assert update.result(30) == served.version
    batch = served.engine.rollout([rollout(served.name("new"))], timeout=30)
    assert sampled_versions(batch) == {served.version}


def test_a_tampered_version_is_refused_and_the_old_one_goes_on(served: Served) -> None:
    bad = served.publish(served.version + 1)
    shard = next(Path(bad.path).glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(SyncError, match="wrong checksum"):
        served.engine.update_weights(bad).result(30)
    batch = served.engine.rollout([rollout(served.name("old"))], timeout=30)
    assert sampled_versions(batch) == {served.version}
    served.version += 2
    update = served.engine.update_weights(served.publish(served.version))
    assert update.result(30) == served.version


def test_a_consumer_is_bounded_and_closes_its_account(served: Served) -> None:
    engine = served.engine
    names = [served.name("bounded") for _ in range(4)]
    engine.attach(ConsumerSpec("run", 4, max_staleness=0, step=-1, version=served.version))
    engine.submit([rollout(name, consumer="run") for name in names])
    batch = engine.wait(2, timeout=30)
    assert batch.rollout_ids == names[:2]
    with pytest.raises(WaitTimeout):  # eta = 0: nothing more is played at this version
        engine.wait(1, timeout=0.5)
    with pytest.raises(
        NotEnoughWork, match="2 prompt groups of 'run' are outstanding, 3 are waited for"
    ):
        engine.wait(3, timeout=30)
    engine.consumed(batch.rollout_ids, step=0, checkpoint_step=-1)
    engine.consumed(batch.rollout_ids, step=0, checkpoint_step=-1)
    engine.detach()
    if isinstance(engine, RemoteInferenceEngine):
        audit = engine.audit()
        assert (audit.lost, audit.duplicated) == (0, 0)
        assert (audit.counts.consumed, audit.counts.cancelled) == (4, 4)
