"""Answers scored outside of rollouts, by a real gateway: `POST /v1/rewards/score` and its client."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from headway.contracts.config.base import ComponentConfig
from headway.contracts.errors import (
    DataError,
    RewardError,
    RewardOutage,
    UnknownName,
    WaitTimeout,
)
from headway.contracts.http import paths
from headway.contracts.http.rewards import MAX_ANSWERS, AnswerToScore, ScoreRequest
from headway.launch.launchers.local import LocalRun
from headway.runtime import scores
from headway.runtime.blocking import Timeouts
from headway.runtime.connections import HttpResponse
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.scores import SCORE_CHUNK
from tests.integration.conftest import run_config
from tests.processes import local_run
from tests.waiting import eventually

TROUBLE = "tests.integration.rewards_in_trouble"
"""Imported by the services that need it alone: it registers rewards."""

TIMEOUT_S = 1.0
SOON_S = 30.0


class Gateway:
    """A gateway without a server, in a process of its own."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run
        self.http = httpx.Client(base_url=run.url, timeout=120.0)

    def ask(self, reward: str | dict[str, Any], *answers: dict[str, Any]) -> httpx.Response:
        part = {"name": reward} if isinstance(reward, str) else reward
        return self.http.post(paths.REWARDS_SCORE, json={"reward": part, "answers": answers})

    def score(self, reward: str | dict[str, Any], *answers: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self.ask(reward, *answers)
        assert answer.status_code == 200, answer.text
        return answer.json()["results"]

    def figure(self, name: str) -> float:
        lines = self.http.get(paths.METRICS).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Gateway]:
    config = run_config(tmp_path_factory.mktemp("scores"), model_dir)
    executor = config.gateway.executor.model_copy(
        update={"reward_timeout_s": TIMEOUT_S, "reward_workers": 2, "reward_attempts": 2}
    )
    modules = (TROUBLE,)
    changed = config.gateway.model_copy(update={"executor": executor, "modules": modules})
    with local_run(config.model_copy(update={"gateway": changed})) as run:
        run.start_gateway()
        gateway = Gateway(run)
        yield gateway
        gateway.http.close()


@pytest.fixture
def client(gateway: Gateway) -> Iterator[RemoteInferenceEngine]:
    engine = RemoteInferenceEngine(gateway.run.url, connect_timeout_s=SOON_S)
    yield engine
    engine.destroy()


def said(text: str, **data: Any) -> dict[str, Any]:
    return {"completion": text, "data": data}


def test_mathematics_is_judged_in_the_order_of_the_answers(gateway: Gateway) -> None:
    texts = [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{2}", "nothing", r"\boxed{x+x}"]
    results = gateway.score(
        "math", *(said(text, answer="1/2") for text in texts), said(r"\boxed{2x}", answer="x + x")
    )
    assert [result["score"] for result in results] == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert [result["verdict"] for result in results][:3] == ["accepted", "accepted", "wrong_answer"]


def is_running(pid: str) -> bool:
    """Not ended, whether or not its end was noticed."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def program(body: str) -> str:
    return f"```python\ndef add(a, b):\n    {body}\n```"


def test_programs_run_in_the_sandbox_and_one_that_never_ends_is_its_own_fault(
    gateway: Gateway,
) -> None:
    tests = {"test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}
    bodies = ["return a + b", "return a * b", "return a +", "while True: pass", "raise OSError"]
    part = {"name": "code", "args": {"cpu_s": 1.0, "fraction": True}}
    results = gateway.score(part, *(said(program(body), **tests) for body in bodies))
    assert [result["score"] for result in results] == [1.0, 0.5, 0.0, 0.0, 0.0]
    verdicts = ["accepted", "wrong_answer", "compile_error", "timeout", "runtime_error"]
    assert [result["verdict"] for result in results] == verdicts


def test_tokens_are_decoded_as_those_of_a_rollout(gateway: Gateway, model_dir: Path) -> None:
    from headway.text.tokenizer import TextTokenizer

    tokenizer = TextTokenizer(str(model_dir))
    prompt, completion = tokenizer.encode("12"), tokenizer.encode("34", add_special_tokens=False)
    ids = {"prompt_ids": prompt, "completion_ids": completion}
    as_tokens, as_text, alone = gateway.score(
        "trouble/tells",
        {**ids, "data": {"row": [1, None]}},
        {"prompt": "12", "completion": "34"},
        {"completion": ""},
    )
    shown = [tokenizer.decode(prompt), tokenizer.decode(completion), prompt, completion]
    assert as_tokens["details"] == {"shown": shown, "row": {"row": [1, None]}}
    assert as_text["details"]["shown"] == ["12", "34", [], []]
    assert alone["details"] == {"shown": ["", "", [], []], "row": {}}


def test_an_answer_without_a_score_has_its_error_and_the_others_their_scores(
    gateway: Gateway, tmp_path: Path
) -> None:
    before = gateway.figure("headway_reward_scored_answers_total{")
    good, raised, last = gateway.score("trouble/raises", said("a"), said("raise"), said("b"))
    assert good == last == {"score": 1.0, "verdict": "scored", "details": {}}
    assert raised["error"]["code"] == "reward"
    assert "'trouble/raises' raised ZeroDivisionError: of no use" in raised["error"]["message"]
    assert raised["error"]["retryable"] is False
    file = tmp_path / "pid"
    killed, good = gateway.score("trouble/hangs", said(str(file)), said("a"))
    assert good["score"] == 1.0
    assert "ran longer than 1 s and was killed" in killed["error"]["message"]
    eventually(lambda: not is_running(file.read_text()), SOON_S, "it was killed")
    (row,) = gateway.score("math", said("1"))
    assert row["error"]["code"] == "data"
    assert gateway.figure("headway_reward_scored_answers_total{") == before + 6
    assert gateway.figure("headway_reward_pending_answers") == 0


def test_an_outage_is_the_whole_calls_and_no_score(gateway: Gateway, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.touch()
    part = {"name": "trouble/out_while", "args": {"path": str(out)}}
    answer = gateway.ask(part, *[said("a")] * 5)
    assert (answer.status_code, answer.json()["code"]) == (503, "reward_outage")
    assert answer.json()["retryable"] is True
    assert answer.headers["retry-after"]
    assert gateway.figure("headway_reward_pending_answers") == 0
    out.unlink()
    assert [result["score"] for result in gateway.score(part, *[said("a")] * 5)] == [1.0] * 5


@pytest.mark.parametrize(
    ("reward", "answer", "status", "told"),
    [
        ("maths", said("1"), 404, "did you mean 'math'"),
        ({"name": "math", "args": {"x": 1}}, said("1"), 400, "x"),
        ("math", {}, 422, "neither of completion and completion_ids"),
        ("math", {"completion": "1", "completion_ids": [1]}, 422, "both of completion"),
        ("math", {**said("1"), "prompt": "", "prompt_ids": [1]}, 422, "as text and as tokens"),
        ("math", {"completion_ids": [-1]}, 422, "completion_ids"),
        ("math", {"completion": "1", "answer": "1"}, 422, "answer"),
        ({"name": "reward_model", "args": {"url": "http://x/"}}, said("1"), 403, "outbound.allow"),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name(
    gateway: Gateway, reward: Any, answer: dict[str, Any], status: int, told: str
) -> None:
    refused = gateway.ask(reward, answer)
    assert (refused.status_code, told in refused.json()["message"]) == (status, True), refused.text


def test_the_number_of_answers_is_bounded(gateway: Gateway) -> None:
    assert len(gateway.score("exact", *[said("1", answer="1")] * MAX_ANSWERS)) == MAX_ANSWERS
    assert gateway.ask("exact", *[said("1", answer="1")] * (MAX_ANSWERS + 1)).status_code == 422
    assert gateway.ask("exact").status_code == 422


def test_a_client_that_goes_away_ends_its_judgements(
    gateway: Gateway, tmp_path: Path, model_dir: Path
) -> None:
    """The verifier hangs long before its own limit, in a gateway whose limit is far away."""
    config = run_config(tmp_path, model_dir)
    executor = config.gateway.executor.model_copy(update={"reward_timeout_s": 600.0})
    modules = (TROUBLE,)
    changed = config.gateway.model_copy(update={"executor": executor, "modules": modules})
    file = tmp_path / "pid"
    body = {
        "reward": {"name": "trouble/hangs"},
        "answers": [said(str(file)), *[said(f"{file}.never")] * 40],
    }
    with local_run(config.model_copy(update={"gateway": changed})) as run:
        run.start_gateway()
        url = httpx.URL(run.url)
        content = json.dumps(body).encode()
        with socket.create_connection((url.host, url.port), timeout=20) as peer:
            head = f"POST {paths.REWARDS_SCORE} HTTP/1.1\r\nhost: x\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
            peer.sendall(head.encode() + content)
            eventually(lambda: file.exists() and file.read_text() != "", SOON_S, "it is judged")
            pid = file.read_text()
            assert is_running(pid)
        eventually(lambda: not is_running(pid), SOON_S, "the scoring has ended")
        with httpx.Client(base_url=run.url, timeout=SOON_S) as http:
            asked = {"reward": {"name": "trouble/hangs"}, "answers": [said("a")]}
            answer = http.post(paths.REWARDS_SCORE, json=asked)
        assert answer.json()["results"][0]["score"] == 1.0
        assert not Path(f"{file}.never").exists(), "one worker judges; the others never began"


def given(text: str, **data: Any) -> AnswerToScore:
    return AnswerToScore(completion=text, data=data)


def test_the_client_cuts_a_batch_and_keeps_its_order(
    client: RemoteInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    ask = client._calls.connections.ask

    def counted(method: str, url: str, body: bytes, timeouts: Timeouts) -> HttpResponse:
        sizes.append(len(ScoreRequest.model_validate_json(body).answers))
        return ask(method, url, body, timeouts)

    monkeypatch.setattr(client._calls.connections, "ask", counted)
    answers = [given(str(number % 5), answer=str(number % 3)) for number in range(150)]
    results = client.score(ComponentConfig(name="exact"), answers)
    assert [r.score for r in results] == [float(n % 5 == n % 3) for n in range(150)]
    assert sizes == [SCORE_CHUNK, SCORE_CHUNK, 150 - 2 * SCORE_CHUNK]
    sizes.clear()
    monkeypatch.setattr(scores, "SCORE_CHUNK_BYTES", 4000)
    fat = [given("1", answer="1", more="x" * size) for size in (3000, 900, 9000, 10, 10)]
    assert [r.score for r in client.score(ComponentConfig(name="exact"), fat)] == [1.0] * 5
    assert sizes == [1, 1, 1, 2]
    assert client.score(ComponentConfig(name="exact"), []) == []


def test_the_client_raises_what_an_answer_has_or_gives_it_the_score_that_was_asked_for(
    client: RemoteInferenceEngine,
) -> None:
    answers = [given("a"), given("raise"), given("b")]
    with pytest.raises(RewardError, match="answer 1: reward 'trouble/raises' raised") as caught:
        client.score(ComponentConfig(name="trouble/raises"), answers)
    assert not caught.value.retryable
    results = client.score(ComponentConfig(name="trouble/raises"), answers, failed_score=-5.0)
    assert [result.score for result in results] == [1.0, -5.0, 1.0]
    assert "of no use" in results[1].details["error"]
    with pytest.raises(DataError, match="answer 0"):
        client.score(ComponentConfig(name="math"), answers)
    with pytest.raises(UnknownName, match="did you mean 'math'"):
        client.score(ComponentConfig(name="maths"), answers)


def test_the_client_waits_for_the_end_of_an_outage_and_not_for_ever(
    gateway: Gateway, client: RemoteInferenceEngine, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.touch()
    part = ComponentConfig(name="trouble/out_while", args={"path": str(out)})
    with pytest.raises(
        WaitTimeout, match=r"0 of 1 answers were scored after 0.3 s; the last attempt: "
    ):
        client.score(part, [given("a")], timeout=0.3)
    hurried = RemoteInferenceEngine(gateway.run.url, connect_timeout_s=0.1)
    with pytest.raises(RewardOutage, match="out of order"):
        hurried.score(part, [given("a")])
    hurried.destroy()
    calls = out.with_suffix(".calls")
    calls.unlink()

    def repair() -> None:
        eventually(lambda: calls.exists() and len(calls.read_text()) > 2, SOON_S, "it is asked")
        out.unlink()

    repairing = threading.Thread(target=repair)
    repairing.start()
    assert [r.score for r in client.score(part, [given("a")] * 3)] == [1.0] * 3
    repairing.join()


def test_an_answer_that_takes_too_long_is_not_waited_for(
    client: RemoteInferenceEngine, tmp_path: Path
) -> None:
    with pytest.raises(WaitTimeout, match=r"0 of 1 answers were scored after 0.5 s"):
        client.score(
            ComponentConfig(name="trouble/hangs"), [given(f"{tmp_path}/pid")], timeout=TIMEOUT_S / 2
        )


@pytest.mark.extended
def test_a_gateway_that_is_killed_in_the_middle_is_asked_again(
    tmp_path: Path, model_dir: Path
) -> None:
    config = run_config(tmp_path, model_dir)
    executor = config.gateway.executor.model_copy(update={"reward_timeout_s": TIMEOUT_S})
    modules = (TROUBLE,)
    changed = config.gateway.model_copy(update={"executor": executor, "modules": modules})
    file = tmp_path / "pid"
    with local_run(config.model_copy(update={"gateway": changed})) as run:
        run.start_gateway()
        client = RemoteInferenceEngine(run.url, connect_timeout_s=60.0)

        answers = [given("a"), given(str(file)), given("b")]
        with ThreadPoolExecutor(1) as caller:
            part = ComponentConfig(name="trouble/hangs")
            results = caller.submit(client.score, part, answers, failed_score=-1.0)
            eventually(file.exists, SOON_S, "it is judged")
            os.kill(run.process("gateway").pid, signal.SIGKILL)
            eventually(lambda: run.process("gateway").exit_code() is not None, SOON_S, "it died")
            run.watch()  # not from a thread: a process that it starts would end with that
            scores = [result.score for result in results.result()]
        client.destroy()
    assert scores == [1.0, -1.0, 1.0]
