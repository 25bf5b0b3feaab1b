"""A consumer's name is its token's: others reach neither into its batch nor at its rollouts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headway.contracts.http import paths
from headway.launch.quickstart import task
from tests.integration.conftest import TINY
from tests.integration.guarded import GATEWAY, Guarded, guarded_run
from tests.waiting import eventually

pytestmark = pytest.mark.extended

OWNER, THIEF = "consume", "submit"
NAME = "trainer-1"
ATTACH = {"consumer": NAME, "batch_size": 1, "max_staleness": 8, "step": -1, "version": 0}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    model = tmp_path_factory.mktemp("model")
    task.write_model(model, TINY)
    with guarded_run(tmp_path_factory.mktemp("run"), model) as both:
        yield both


def rollout(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "rollout_id": name,
        "consumer": NAME,
        "prompt": {"group_id": name, "text": "12", "data": {"answer": "1"}},
        "reward": {"name": "exact", "args": {"pattern": "[0-9]"}},
        "gconfig": {"max_new_tokens": 2},
        **fields,
    }


def submit(guarded: Guarded, role: Any, *rollouts: dict[str, Any]) -> httpx.Response:
    return guarded.ask(GATEWAY, "POST", paths.ROLLOUTS, role, json={"rollouts": rollouts})


def play(guarded: Guarded, name: str) -> None:
    """A step of the owner."""
    assert submit(guarded, OWNER, rollout(name)).status_code == 200
    wanted = {
        "delivery_id": name,
        "count": 1,
        "consumer": NAME,
        "timeout_s": 30.0,
        "format": "json",
    }
    answer = guarded.ask(GATEWAY, "POST", paths.ROLLOUTS_WAIT, OWNER, json=wanted)
    (group,) = answer.json()["groups"]
    assert group["rollout_id"] == name
    told = {"rollout_ids": [name], "step": 0, "checkpoint_step": -1}
    path = paths.ROLLOUTS_CONSUMED
    assert guarded.ask(GATEWAY, "POST", path, OWNER, json=told).status_code == 204


def steal(guarded: Guarded) -> None:
    """All that a token of role `submit` may ask for under a name."""
    session = {"rollout_id": "stolen", "consumer": NAME}
    for path, body in (
        (paths.ROLLOUTS, {"rollouts": [rollout("stolen")]}),
        (paths.ROLLOUTS, {"rollouts": [rollout("mine", consumer="thief"), rollout("stolen")]}),
        (paths.SESSIONS, session),
    ):
        answer = guarded.ask(GATEWAY, "POST", path, THIEF, json=body)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), answer.text
        assert f"consumer '{NAME}' belongs to another token" in answer.json()["message"]
    for name in ("stolen", "mine"):
        path = paths.ROLLOUT.format(rollout_id=name)
        assert guarded.ask(GATEWAY, "GET", path, THIEF).status_code == 404


def test_a_batch_is_its_owner_s_also_after_a_kill(guarded: Guarded):
    assert guarded.ask(GATEWAY, "POST", paths.CONSUMER, OWNER, json=ATTACH).status_code == 200
    play(guarded, "r0")
    steal(guarded)
    os.kill(guarded.pid(GATEWAY), signal.SIGKILL)

    def is_back() -> bool:
        guarded.run.watch()
        try:
            servers = guarded.ask(GATEWAY, "GET", paths.STATUS).json()["servers"]
        except httpx.HTTPError:
            return False
        return [server["state"] for server in servers] == ["ready"]

    eventually(is_back, 60.0, "the gateway is back")
    steal(guarded)
    play(guarded, "r1")
    assert submit(guarded, THIEF, rollout("own", consumer="thief")).status_code == 200
    assert submit(guarded, OWNER, rollout("back", consumer="thief")).status_code == 403
    told = {"rollout_ids": ["own"], "reason": "spite"}
    assert guarded.ask(GATEWAY, "POST", paths.ROLLOUTS_CANCEL, OWNER, json=told).status_code == 403
    thief = {"consumer": "thief"}
    assert guarded.ask(GATEWAY, "DELETE", paths.CONSUMER, OWNER, json=thief).status_code == 403
    assert guarded.ask(GATEWAY, "DELETE", paths.CONSUMER, "admin", json=thief).status_code == 200
    assert submit(guarded, OWNER, rollout("back", consumer="thief")).status_code == 200
