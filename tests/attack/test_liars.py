"""Whom a gateway asks may lie: a generation server, and a verifier, each a process beside honest ones.

All the while a victim's rollouts end well, loops go on, and no memory grows.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from headway.contracts.http import paths
from headway.launch.quickstart import task
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.process import Process, ProcessSpec
from tests.attack.corpus import judging
from tests.attack.liars import LIES
from tests.attack.stalls import status_of, without_stall
from tests.attack.test_standstill import Victim
from tests.integration.builders import rollout
from tests.integration.conftest import model_dir  # noqa: F401 - a fixture
from tests.processes import start_process
from tests.waiting import eventually

pytestmark = pytest.mark.extended

READY_S = 60.0
VOCABULARY = len(task.SPECIAL_TOKENS) + len(task.CHARACTERS)
MAX_GROWTH_BYTES = 64 << 20


@dataclass
class Place:
    """A gateway, an honest server, a verifier, and a victim who plays there."""

    gateway: Process
    url: str
    verifier: str
    victim: Victim
    start: Callable[..., Process]

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60.0, trust_env=False)

    def survive(self, attack: Callable[[], None]) -> None:
        """Assert that the gateway's loop goes on, its memory stays, and the victim plays."""

        def outlast() -> None:
            attack()
            self.victim.go_on()

        process = psutil.Process(self.gateway.pid)
        before = process.memory_info().rss
        without_stall(outlast, self.url)
        growth = process.memory_info().rss - before
        assert growth < MAX_GROWTH_BYTES, f"the gateway grew by {growth >> 20} MiB"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Place]:  # noqa: F811
    folder = tmp_path_factory.mktemp("liars")
    with ExitStack() as stack:

        def start(name: str, module: str, *arguments: str, flag: str) -> Process:
            ready = folder / f"{name}.json"
            argv = [sys.executable, "-m", module, *arguments, flag, str(ready)]
            spec = ProcessSpec(name, argv, folder / f"{name}.log", ready_file=ready)
            process = start_process(spec)
            stack.callback(process.stop, 5.0)
            process.wait_ready(READY_S)
            return process

        ready_file, port = "--service.ready-file", ("--service.port", "0")
        liars = "tests.attack.liars"
        verifier = start("verifier", liars, "verifier", flag="--ready-file").wait_ready(READY_S)
        gateway = start(
            "gateway",
            "headway.launch.cli",
            *("gateway", *port, "--tokenizer", str(model_dir)),
            *("--ledger", str(folder / "ledger.sqlite")),
            *("--fleet.quarantine-s", "0.05"),
            *("--outbound.allow", f'["{verifier}/"]', "--outbound.allow-private", "true"),
            flag=ready_file,
        )
        url = gateway.wait_ready(READY_S)
        start(
            "server",
            "inference_server",
            *(*port, "--model.path", str(model_dir), "--gateway", url),
            *("--heartbeat-s", "0.2", "--backend.type", "fake"),
            flag=ready_file,
        )
        with Victim(url).playing() as victim:
            victim.go_on()
            yield Place(gateway, url, verifier, victim, start)


def told_by(liar: str) -> Counter[str]:
    return Counter(httpx.get(liar, trust_env=False).json())


def test_a_server_lies_and_the_victim_goes_on(place: Place) -> None:
    liar = place.start(
        "liar", "tests.attack.liars", "server", "--gateway", place.url, flag="--ready-file"
    )
    url = liar.wait_ready(READY_S)

    engine = RemoteInferenceEngine(place.url)
    engine.initialize()
    numbers = count()

    def play() -> None:
        """Many at once, so that both servers are asked, until each lie was told."""
        before = told_by(url)
        deadline = time.monotonic() + 60.0
        while missing := LIES.keys() - (told_by(url) - before):
            assert time.monotonic() < deadline, missing
            batch = [
                rollout(f"busy-{next(numbers)}", 4, group_size=1, consumer="busy") for _ in range(8)
            ]
            for row in engine.rollout(batch, 60.0).trajectories:
                assert max(row.input_ids) < VOCABULARY
                assert set(row.versions[row.loss_mask]) == {0}

    place.survive(play)
    status = status_of(place.url)
    states = {server.server_id: server.state for server in status.servers}
    assert states.pop("liar") != "ready"
    assert set(states.values()) == {"ready"}
    assert status.counts.failed == 0
    engine.destroy()
    liar.stop(5.0)


REFUSED = {
    "never": "did not answer within 1 s",
    "endless": "more than 1048576 bytes",
    "drops": "did not answer within 1 s",
    "failing": "answered 500",
    "count": "the body",
    "text": "score",
    "huge": "finite as float32",
    "infinite": "finite",
    "verdict": "verdict",
    "details": "details of 9",
    "many-details": "details of",
    "members": "members",
    "nan": "no JSON",
    "nested": "no JSON",
    "lists": "the body",
    "half-a-pair": "no JSON",
}


@pytest.mark.parametrize("lie", REFUSED)
def test_a_verifier_lies_and_that_is_no_score(place: Place, lie: str) -> None:
    body = judging("reward_model", "1", {}, url=f"{place.verifier}/{lie}", timeout_s=1.0)

    def ask() -> None:
        answer = place.post(paths.REWARDS_SCORE, body)
        assert answer.status_code in (200, 503), answer.text[:500]
        assert REFUSED[lie] in answer.text, answer.text[:500]
        assert '"score"' not in answer.text.replace('{"score": number}', "")
        assert len(answer.text) < 2_000

    place.survive(ask)


GAMES = {
    "end-of-many": "Extra inputs",
    "rewards-of-many": "turn_rewards",
    "endless-game": "is_last",
    "huge-end": "finite as float32",
    "detailed-end": "details of 9",
    "lists": "answered",
}


@pytest.mark.parametrize("lie", GAMES)
def test_a_game_lies_and_its_rollout_fails(place: Place, lie: str) -> None:
    name = f"game-{lie}-{{}}"
    names = (name.format(number) for number in range(9))
    args = {"url": f"{place.verifier}/{lie}", "max_turns": 1, "timeout_s": 5.0}

    def play() -> None:
        rollout = {
            "rollout_id": next(names),
            "consumer": "gamer",
            "prompt": {"group_id": lie, "text": "1", "data": {"answer": "1"}},
            "workflow": {"name": "callback", "args": args},
            "reward": {"name": "exact"},
            "gconfig": {"max_new_tokens": 2},
        }
        place.post(paths.ROLLOUTS, {"rollouts": [rollout]}).raise_for_status()
        where = place.url + paths.ROLLOUT.format(rollout_id=rollout["rollout_id"])

        def found() -> dict[str, Any]:
            return dict(httpx.get(where, trust_env=False).json()["summary"])

        eventually(lambda: found()["state"] == "failed", 60.0, f"failed, not {found()}")
        assert GAMES[lie] in str(found()["reason"]), found()
        assert len(str(found())) < 10_000

    place.survive(play)
