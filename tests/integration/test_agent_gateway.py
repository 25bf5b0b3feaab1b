"""An unmodified agent against a real gateway with a real server: processes, a durable ledger, kill -9."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from openai import OpenAI

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.types import ConsumerSpec, TrajectoryBatch
from headway.launch.launchers.local import LocalRun
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.waiting import eventually

pytestmark = pytest.mark.extended

CHATML = """{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
KEY_CHARS = 32


@pytest.fixture
def config(
    make_config: Callable[..., LaunchConfig], model_dir: Path, tmp_path: Path
) -> LaunchConfig:
    """A gateway whose tokenizer knows chats, and a server that makes tokens up."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(model_dir, tokenizer)
    (tokenizer / "chat_template.jinja").write_text(CHATML)
    plain = make_config()
    server = plain.server.model_copy(update={"backend": FakeBackendConfig(vocab_size=12)})
    gateway = plain.gateway.model_copy(update={"tokenizer": str(tokenizer)})
    return plain.model_copy(update={"server": server, "gateway": gateway})


def open_session(url: str, rollout_id: str) -> dict[str, str]:
    asked = {"rollout_id": rollout_id, "consumer": "trainer", "gconfig": {"max_new_tokens": 9}}
    answer = httpx.post(f"{url}/v1/sessions", json=asked, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return answer.json()


def play(told: dict[str, str], turns: int) -> list[str]:
    """An agent that answers whatever it hears."""
    heard = []
    with OpenAI(base_url=told["openai_url"], api_key=told["api_key"], max_retries=0) as client:
        messages = [{"role": "user", "content": "1 + 2"}]
        for _ in range(turns):
            answer = client.chat.completions.create(model="policy", messages=messages)
            heard.append(answer.choices[0].message.content)
            messages += [answer.choices[0].message, {"role": "user", "content": "and 3"}]
    return heard


def end(told: dict[str, str]) -> dict[str, str]:
    headers = {"authorization": f"Bearer {told['api_key']}"}
    answer = httpx.post(told["end_url"], json={"reward": 0.5}, headers=headers, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_batch(batch: TrajectoryBatch, turns: int) -> None:
    """What a trainer can train on."""
    ((row,),) = (group.trajectories for group in batch.groups)
    sampled = row.loss_mask
    assert row.reward == 0.5
    assert len(row.turns) == turns
    assert sampled.sum() == sum(turn.end - turn.start for turn in row.turns) == 9 * turns
    assert (row.versions[sampled] == 0).all() and (row.versions[~sampled] == -1).all()
    assert (row.logprobs[sampled] == -1.0).all() and not row.logprobs[~sampled].any()
    assert np.isfinite(row.logprobs).all()
    assert len(row.input_ids) == len(sampled) > 9 * turns


def attach(engine: RemoteInferenceEngine) -> None:
    spec = ConsumerSpec(consumer="trainer", batch_size=1, max_staleness=1, step=-1, version=0)
    engine.attach(spec)


def test_an_agent_plays_and_a_trainer_waits_for_what_it_played(
    config: LaunchConfig,
    start: Callable[[LaunchConfig], LocalRun],
    connect: Callable[[str], RemoteInferenceEngine],
):
    run = start(config)
    engine = connect(run.url)
    attach(engine)
    told = open_session(run.url, "game-1")
    assert len(told["api_key"]) == KEY_CHARS
    play(told, turns=3)
    assert end(told) == {"rollout_id": "game-1", "state": "ready"}
    check_batch(engine.wait(1, timeout=30.0), turns=3)


def test_a_session_of_a_killed_gateway_is_opened_anew(
    config: LaunchConfig,
    start: Callable[[LaunchConfig], LocalRun],
    connect: Callable[[str], RemoteInferenceEngine],
):
    run = start(config)
    lost = open_session(run.url, "game-1")
    play(lost, turns=1)
    os.kill(run.process("gateway").pid, signal.SIGKILL)
    eventually(lambda: run.process("gateway").exit_code() is not None, 10, "the gateway is dead")
    run.watch()
    engine = connect(run.url)
    told = open_session(run.url, "game-1")
    assert told["session_id"] != lost["session_id"]
    with pytest.raises(Exception, match="open it again with its rollout_id"):
        play(lost, turns=1)
    play(told, turns=2)
    end(told)
    attach(engine)
    check_batch(engine.wait(1, timeout=30.0), turns=2)
    audit = httpx.get(f"{run.url}/v1/ledger").json()
    assert (audit["lost"], audit["duplicated"]) == (0, 0)
