"""Whole runs that evaluate versions while training goes on, also when processes are killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from headway.contracts.config.evaluation import EvaluationConfig
from headway.contracts.config.gateway import OutboundConfig
from headway.contracts.config.launch import LaunchConfig
from headway.launch.launchers.local import LocalRun
from headway.launch.quickstart import task
from headway.runtime.config import validate_config
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.driving import finish, kill, resume
from tests.waiting import eventually

pytestmark = pytest.mark.extended

Start = Callable[[LaunchConfig], LocalRun]
Connect = Callable[[str], RemoteInferenceEngine]
Configure = Callable[..., LaunchConfig]
NUM_PROMPTS = 6
BATCH = 16


class Judge:
    """A reward model that answers when a test lets it: until then an evaluation stays open."""

    def __init__(self) -> None:
        self.may_answer = Event()
        self.asked = Event()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                judge.asked.set()
                judge.may_answer.wait(100)
                answer = json.dumps({"score": float("1" in body["completion"])}).encode()
                try:
                    self.send_response(200)
                    self.send_header("content-length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)
                except OSError:
                    pass  # who asked was killed

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def judge() -> Iterator[Judge]:
    one = Judge()
    yield one
    one.close()


@pytest.fixture
def configure(make_config: Configure, tmp_path: Path, judge: Judge) -> Configure:
    """A run with an evaluation of `NUM_PROMPTS` prompts, of which two are in play at a time."""

    def with_evaluation(evaluation: dict[str, Any] | None = None, **settings: Any) -> LaunchConfig:
        task.write_rows(tmp_path / "held_out.jsonl", task.make_rows(20, seed=2))
        tree = {
            "data": {"path": str(tmp_path / "held_out.jsonl"), "shuffle": False},
            "limit": NUM_PROMPTS,
            "every_steps": 2,
            "num_samples": 2,
            "sampling": {"temperature": 0.7},
            "reward": {"name": "reward_model", "args": {"url": judge.url, "timeout_s": 100}},
            "max_concurrent": 4,
            **(evaluation or {}),
        }
        config = make_config(**settings)
        outbound = OutboundConfig(allow=(judge.url,), allow_private=True)
        sync = config.trainer.weight_sync.model_copy(update={"keep": 1})
        trainer = config.trainer.model_copy(
            update={"evaluation": validate_config(EvaluationConfig, tree), "weight_sync": sync}
        )
        gateway = config.gateway.model_copy(update={"outbound": outbound})
        return config.model_copy(update={"trainer": trainer, "gateway": gateway})

    return with_evaluation


def lines_of(config: LaunchConfig, name: str = "evaluation.jsonl") -> list[dict[str, Any]]:
    file = Path(config.trainer.run_dir) / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def check_nothing_open(config: LaunchConfig) -> None:
    """Nothing of an evaluation is left behind."""
    assert not list(Path(config.trainer.run_dir).glob("evaluation.open*"))


def check_books(client: RemoteInferenceEngine, num_steps: int, num_evaluations: int) -> None:
    audit = client.audit()
    assert (audit.lost, audit.duplicated) == (0, 0)
    assert audit.max_staleness <= 1
    evaluated = num_evaluations * NUM_PROMPTS * 2
    assert audit.counts.consumed == num_steps * BATCH + evaluated


def until_open_beside(client: RemoteInferenceEngine, version: int, newest: int) -> None:
    """A newer version is committed while servers stay at the one that is evaluated."""

    def is_so() -> bool:
        weights = client.weights()
        committed = 0 if weights.committed is None else weights.committed.version
        return weights.reserved == version and committed >= newest

    eventually(is_so, 100, f"version {newest} serves beside {version}")


def pid_of_reserved(client: RemoteInferenceEngine) -> int:
    servers = client.status().servers
    return next(int(one.server_id.split("-")[-2]) for one in servers if one.state == "reserved")


def test_versions_are_committed_while_a_former_one_is_evaluated(
    configure: Configure, start: Start, connect: Connect, judge: Judge
) -> None:
    config = configure(steps=7, num_servers=2)
    run = start(config)
    client = connect(run.url)
    run.start_trainer()
    until_open_beside(client, 2, 5)  # the evaluation due after step 4 has been missed by now
    assert judge.asked.is_set()
    judge.may_answer.set()
    finish(run)
    check_nothing_open(config)
    lines = {line["step"]: line for line in lines_of(config)}
    assert lines[4]["missed"].startswith("the evaluation of version 2 was open still")
    metrics = [line for line in lines.values() if "missed" not in line]
    assert {2, 7} <= {line["step"] for line in metrics}  # the last version's is waited for
    for line in metrics:
        assert (line["num_prompts"], line["num_samples"]) == (NUM_PROMPTS, 2 * NUM_PROMPTS)
        assert line["version"] == line["step"]
        assert line["pass@1"] == pytest.approx(line["score"])
        assert line["pass@2"] >= line["pass@1"]
        assert (line["response_tokens"], line["truncated"]) == (12.0, 1.0)
    steps = lines_of(config, "metrics.jsonl")
    for step in steps:
        if "evaluation_step" in step:
            assert step["evaluation_score"] == lines[step["evaluation_step"]]["score"]
    check_books(client, 7, len(metrics))


def test_an_evaluation_outlives_its_server_and_the_gateway(
    configure: Configure, start: Start, connect: Connect, judge: Judge
) -> None:
    config = configure({"every_steps": 3, "at_end": False}, steps=8, num_servers=3)
    run = start(config)
    client = connect(run.url)
    run.start_trainer()
    until_open_beside(client, 3, 5)  # two versions on, of which the store keeps the newest only
    os.kill(pid_of_reserved(client), signal.SIGKILL)
    before = run.process("gateway").pid
    os.kill(before, signal.SIGKILL)
    eventually(
        lambda: run.watch() is None and run.process("gateway").pid != before,
        30,
        "the gateway is started again",
    )
    judge.may_answer.set()
    finish(run)
    check_nothing_open(config)
    lines = {line["step"]: line for line in lines_of(config)}
    assert "missed" not in lines[3], lines[3]["missed"]
    assert (lines[3]["version"], lines[3]["num_prompts"]) == (3, NUM_PROMPTS)
    check_books(client, 8, sum("missed" not in line for line in lines.values()))


def test_a_trainer_that_was_killed_goes_on_with_its_evaluation(
    configure: Configure, start: Start, connect: Connect, judge: Judge
) -> None:
    settings = {"steps": 6, "num_servers": 2, "every_steps": 2}
    config = configure({"every_steps": 4}, **settings)
    run = start(config)
    client = connect(run.url)
    run.start_trainer()
    until_open_beside(client, 4, 5)
    checkpoint = Path(config.trainer.run_dir) / "checkpoints" / "step-00000004"
    eventually(checkpoint.exists, 30, "a checkpoint holds the step that is evaluated")
    kill(run, "trainer")
    judge.may_answer.set()
    resume(run, config)
    check_nothing_open(config)
    assert [line["step"] for line in lines_of(config)] == [4, 6]
    assert [line["num_prompts"] for line in lines_of(config)] == [NUM_PROMPTS] * 2
    assert lines_of(config)[0]["version"] == 4  # of before the crash
    check_books(client, 6, 2)


def test_a_version_that_nobody_keeps_is_missed_with_the_reason(
    configure: Configure, start: Start, connect: Connect, judge: Judge
) -> None:
    evaluation = {"every_steps": 3, "at_end": False, "server_wait_s": 0.2}
    config = configure(evaluation, steps=5)
    run = start(config)
    client = connect(run.url)
    run.start_trainer()
    finish(run)
    check_nothing_open(config)
    [line] = lines_of(config)
    assert (line["step"], line["version"]) == (3, 3)
    assert "one is left to training" in line["missed"]
    assert "score" not in line
    check_books(client, 5, 0)
    counts = client.audit().counts
    assert (counts.queued, counts.leased, counts.ready, counts.delivered) == (0, 0, 0, 0)
