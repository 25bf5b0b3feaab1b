"""litellm, verifiers and sglang-router, the real packages, before gateways and servers."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.http.paths import STATUS
from headway.contracts.http.status import StatusResponse
from headway.contracts.types import Trajectory
from tests.contract.page_runner import free_port
from tests.integration.real_engines import engine_python, needs, show
from tests.integration.test_agent_gateway import CHATML, end
from tests.integration.test_fleet_adapters import write_plain_model
from tests.integration.version_fleet import LIMIT_S, PROMPT, Fleet, sampling
from tests.numeric.models import load_reference, reference_logprobs
from tests.waiting import eventually
from weight_sync.model_dir import load_model

pytestmark = needs("clients")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
TOKENS = 12
SECOND = 0.7
"""Factor of the second version's weights."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A gateway and two servers with a model that chats."""
    folder = tmp_path_factory.mktemp("fleet")
    with closing(Fleet(folder, 2, write_model=write_model)) as fleet:
        yield fleet


def write_model(folder: Path) -> Path:
    write_plain_model(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def run_client(*words: str) -> dict[str, Any]:
    """What a client prints."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [engine_python("clients"), Path(__file__).with_name("real_clients.py"), *words],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        env=kept | ENVIRONMENT,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return said


def test_litellm_chats_streams_and_completes(fleet: Fleet) -> None:
    said = run_client("litellm", fleet.url)
    assert said["whole"] == said["streamed"] and said["plain"]
    assert said["usage"] == len(said["logprobs"]) == TOKENS
    assert said["finish_reason"] == "length"
    assert all(logprob <= 0 for logprob in said["logprobs"])


def test_a_verifiers_episode_arrives_whole_over_a_version_change(fleet: Fleet) -> None:
    asked = {"rollout_id": "sums", "gconfig": {"max_new_tokens": TOKENS}}
    told = httpx.post(f"{fleet.url}/v1/sessions", json=asked, timeout=LIMIT_S).json()
    second = write_second(fleet)
    said = run_client("verifiers", told["openai_url"], told["api_key"], fleet.url, str(second))
    end(told)
    assert said["reward"] == 0.75
    ((row,),) = (group.trajectories for group in fleet.engine.wait(1, LIMIT_S).groups)
    assert len(row.turns) == len(said["turns"]) == 3
    for turn, tokens in zip(row.turns, said["turns"], strict=True):
        assert row.input_ids[: turn.start].tolist() == tokens["prompt_ids"]
        assert row.input_ids[turn.start : turn.end].tolist() == tokens["completion_ids"]
        sampled = row.logprobs[turn.start : turn.end]
        assert sampled == pytest.approx(tokens["completion_logprobs"], abs=1e-6)
    assert [set(row.versions[turn.start : turn.end]) for turn in row.turns] == [{0}, {0}, {1}]
    error = error_of(row, {0: fleet.model, 1: second})
    show(f"largest error of a logprob: {error:.1e}")
    assert error < 1e-4


def write_second(fleet: Fleet) -> Path:
    model = load_model(ModelConfig(path=str(fleet.model)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SECOND)
    folder = fleet.weights / "second"
    model.save_pretrained(folder)
    return folder


def error_of(row: Trajectory, folders: dict[int, Path]) -> float:
    """Largest difference to the logprobs of transformers, under the version of each token."""
    worst = 0.0
    for turn in row.turns:
        ids = row.input_ids.tolist()
        (version,) = set(row.versions[turn.start : turn.end].tolist())
        expected = reference_logprobs(
            load_reference(folders[version]), ids[: turn.start], ids[turn.start : turn.end], 1.0
        )
        sampled = row.logprobs[turn.start : turn.end]
        worst = max(worst, float(np.abs(expected.detach().numpy() - sampled).max()))
    return worst


@contextmanager
def router(*workers: str) -> Iterator[httpx.Client]:
    """A client of sglang-router in front of these."""
    port, metrics = free_port(), free_port()
    words = ["-m", "sglang_router.launch_router", "--port", str(port), "--policy", "round_robin"]
    process = subprocess.Popen(
        [
            engine_python("clients"),
            *words,
            "--prometheus-port",
            str(metrics),
            "--worker-urls",
            *workers,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client:

            def knows_all() -> bool:
                """It answers before it has looked at its workers, which it then does not ask."""
                try:
                    known = client.get("/workers").json()["workers"]
                except httpx.TransportError:
                    assert process.poll() is None
                    return False
                return {one["url"] for one in known if one["is_healthy"]} == set(workers)

            eventually(knows_all, LIMIT_S, "the router knows its workers")
            yield client
    finally:
        process.kill()  # asked to end, it waits for a minute
        process.wait(LIMIT_S)


def test_sglang_router_spreads_requests_over_servers(fleet: Fleet) -> None:
    before = generated(fleet)
    with router(*before) as client:
        for number in range(4):
            body = {
                "input_ids": PROMPT,
                "sampling_params": sampling(TOKENS),
                "return_logprob": True,
            }
            answer = client.post("/generate", json={**body, "rid": f"routed-{number}"})
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["output_ids"]) == TOKENS
            logprobs = [each[0] for each in answer.json()["meta_info"]["output_token_logprobs"]]
            assert math.isfinite(sum(logprobs)) and len(logprobs) == TOKENS
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1 + 2"}]}),
            ("/v1/completions", {"prompt": "1 + 2"}),
        ):
            asked = {"model": "default", "max_tokens": TOKENS, "ignore_eos": True, **body}
            answers = [client.post(path, json=asked) for _ in range(2)]
            assert [one.status_code for one in answers] == [200, 200], answers[0].text
            used = [one.json()["usage"]["completion_tokens"] for one in answers]
            assert used == [TOKENS, TOKENS]
    wanted = {url: tokens + 4 * TOKENS for url, tokens in before.items()}
    eventually(lambda: generated(fleet) == wanted, LIMIT_S, "each server had half of them")


def generated(fleet: Fleet) -> dict[str, int]:
    """Tokens that each server says that it has sampled; the gateway knows it a heartbeat later."""
    told = {}
    for url in [server.url for server in fleet.ready()]:
        status = StatusResponse.model_validate_json(
            httpx.get(url + STATUS, timeout=LIMIT_S).content
        )
        told[url] = status.servers[0].generated_tokens
    return told
