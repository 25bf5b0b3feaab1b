"""No request makes an event loop stand still: a real gateway, a real server, and a victim's rollouts.

Each attack is answered, as it should be, while the loops go on; the victim's rollouts end all the time.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.process import Process, ProcessSpec
from tests.attack.corpus import DIGITS, JUDGEMENTS, SUBMISSIONS, TO_THE_SERVER, asking, chatting
from tests.attack.stalls import without_stall
from tests.integration.builders import rollout
from tests.integration.conftest import model_dir  # noqa: F401 - a fixture
from tests.processes import start_process
from tests.waiting import eventually

pytestmark = pytest.mark.extended

READY_S = 60.0
MAX_CONTEXT = 256
TEMPLATE = """{% for message in messages %}{{ message.content }}{% endfor %}
{%- if 'LOOP' in messages[0].content %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"""


@dataclass
class Victim:
    """Submits a rollout, waits for it, and so on."""

    url: str
    done: int = 0
    errors: list[Exception] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def play(self) -> None:
        engine = RemoteInferenceEngine(self.url)
        engine.initialize()
        while not self._over.is_set():
            try:
                name = f"victim-{self.done}"
                engine.rollout([rollout(name, 2, group_size=1, consumer="victim")], 60.0)
                self.done += 1
            except Exception as error:  # noqa: BLE001 - told by the test
                self.errors.append(error)
                self._over.set()
        engine.destroy()

    @contextmanager
    def playing(self) -> Iterator[Victim]:
        thread = threading.Thread(target=self.play)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def go_on(self) -> None:
        """Wait until it has played some more."""
        wanted = self.done + 2
        eventually(lambda: self.done >= wanted or self.errors, 60.0)
        assert not self.errors


@dataclass
class Place:
    """A gateway, its server, and who plays there."""

    gateway: str
    server: str
    victim: Victim

    def attack(
        self, whom: str, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """One request, during which nothing stood still for long."""
        url = self.gateway if whom == "gateway" else self.server

        def ask() -> httpx.Response:
            answer = httpx.post(
                f"{url}{path}", json=body, headers=headers, timeout=60.0, trust_env=False
            )
            self.victim.go_on()
            return answer

        return without_stall(ask, self.gateway, self.server)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Place]:  # noqa: F811
    folder = tmp_path_factory.mktemp("standstill")
    model = folder / "model"
    shutil.copytree(model_dir, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    started: list[Process] = []

    def start(name: str, module: str, *arguments: str) -> str:
        ready = folder / f"{name}.json"
        argv = [sys.executable, "-m", module, *arguments]
        argv += ["--service.port", "0", "--service.ready-file", str(ready)]
        started.append(
            start_process(ProcessSpec(name, argv, folder / f"{name}.log", ready_file=ready))
        )
        return started[-1].wait_ready(READY_S)

    try:
        gateway = start(
            "gateway",
            "headway.launch.cli",
            "gateway",
            *("--tokenizer", str(model)),
            *("--ledger", str(folder / "ledger.sqlite")),
        )
        server = start(
            "server",
            "inference_server",
            *("--model.path", str(model)),
            *("--gateway", gateway),
            *("--heartbeat-s", "0.2"),
            *("--backend.type", "embedded_torch"),
            *("--backend.max-context", str(MAX_CONTEXT)),
            *("--backend.num-threads", "1"),
        )
        with Victim(gateway).playing() as victim:
            victim.go_on()
            yield Place(gateway, server, victim)
    finally:
        for process in reversed(started):
            process.stop(5.0)


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_a_submission_is_refused_and_the_loops_go_on(place: Place, name: str) -> None:
    body, status, why = SUBMISSIONS[name]
    answer = place.attack("gateway", "/v1/rollouts", body)
    assert (answer.status_code, why in answer.text) == (status, True), answer.text[:500]
    with httpx.Client(trust_env=False) as client:
        found = client.get(f"{place.gateway}/v1/rollouts", params={"consumer": "attacker"}).json()
    assert found["rollouts"] == []


def test_a_large_group_begins_and_the_loops_go_on(place: Place) -> None:
    row = {"consumer": "crowd", "rollout_id": "crowd"}
    body = asking(
        {**row, "prompt": {"group_size": 512, "text": "1" * 200, "data": {"answer": "1"}}}
    )
    assert place.attack("gateway", "/v1/rollouts", body).status_code == 200
    taken = {"rollout_ids": ["crowd"], "delivery_id": "large", "count": 1, "format": "json"}
    assert place.attack("gateway", "/v1/rollouts/wait", taken).status_code == 200


@pytest.mark.parametrize("name", JUDGEMENTS)
def test_an_answer_is_judged_and_the_loops_go_on(place: Place, name: str) -> None:
    answer = place.attack("gateway", "/v1/rewards/score", JUDGEMENTS[name])
    assert answer.status_code < 500, answer.text[:500]


@pytest.mark.parametrize("name", TO_THE_SERVER)
def test_a_server_answers_and_the_loops_go_on(place: Place, name: str) -> None:
    path, body, status = TO_THE_SERVER[name]
    assert place.attack("server", path, body).status_code == status


def test_an_agent_says_much_and_the_loops_go_on(place: Place) -> None:
    body = {"rollout_id": "agent", "consumer": "attacker", "gconfig": {"max_new_tokens": 2}}
    with httpx.Client(timeout=30.0, trust_env=False) as client:
        session = client.post(f"{place.gateway}/v1/sessions", json=body).json()
    path = session["openai_url"].removeprefix(place.gateway) + "/chat/completions"
    headers = {"authorization": f"Bearer {session['api_key']}"}
    for content in ("LOOP", DIGITS[:900_000]):
        answer = place.attack("gateway", path, {"model": "m", **chatting(content)}, headers)
        assert 400 <= answer.status_code < 500, answer.text[:500]
