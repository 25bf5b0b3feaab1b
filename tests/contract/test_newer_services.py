"""Today's clients with the services of tomorrow, whose answers hold fields that nobody knows yet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.app.main import make_gateway
from headway.contracts.codec import MEDIA_TYPE
from headway.contracts.config.gateway import GatewayConfig, ServiceConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.errors import NotFound
from headway.contracts.http import paths
from headway.contracts.http.rewards import AnswerToScore
from headway.contracts.http.rollouts import SubmitRequest
from headway.contracts.http.weights import WeightReservation
from headway.contracts.types import ConsumerSpec, LLMRequest
from headway.launch.quickstart import task
from headway.runtime.inference_client import RemoteInferenceEngine
from inference_server.app import make_app
from inference_server.engine import make_generator
from tests.integration.builders import EXACT, rollout
from tests.unit.runtime.served import served
from tests.waiting import eventually
from weight_sync.transports.disk import make_local_publisher

TOMORROW = "field_of_tomorrow"
WAIT_S = 20.0
MAPS = {"logit_bias"}
"""Objects whose keys are data, not fields."""


class Tomorrow:
    """Adds a field to every object of every answer, and to the header of trajectories."""

    def __init__(self, app: ASGIApp, seen: set[str]) -> None:
        self._app = app
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held: list[Message] = []

        async def hold(message: Message) -> None:
            held.append(message)
            if message["type"] != "http.response.body":
                return
            if not message.get("more_body"):
                start, body = held[0], b"".join(part.get("body", b"") for part in held[1:])
                headers = dict(start["headers"])
                kind = headers.get(b"content-type", b"").decode()
                if body and (change := CHANGES.get(kind)) is not None:
                    body = change(body)
                    headers[b"content-length"] = str(len(body)).encode()
                    self._seen.add(f"{scope['method']} {scope['path']}")
                await send({**start, "headers": list(headers.items())})
                await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, hold if scope["type"] == "http" else send)


def in_json(body: bytes) -> bytes:
    return json.dumps(grown(json.loads(body))).encode()


def grown(tree: Any) -> Any:
    """The same with a further field in every object."""
    if isinstance(tree, dict):
        parts = {name: part if name in MAPS else grown(part) for name, part in tree.items()}
        return parts | {TOMORROW: {"depth": 1}}
    return [grown(part) for part in tree] if isinstance(tree, list) else tree


def in_trajectories(body: bytes) -> bytes:
    """A further column, a further entry of the metadata, a further field of the header."""
    start = 8 + int.from_bytes(body[:8], "little")
    places = json.loads(body[8:start])
    about = places["__metadata__"]
    header = json.loads(about["trajectories"]) | {TOMORROW: [1]}
    about |= {"trajectories": json.dumps(header), TOMORROW: "1"}
    end = len(body) - start
    places[TOMORROW] = {"dtype": "I32", "shape": [1], "data_offsets": [end, end + 4]}
    head = json.dumps(places).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + body[start:] + bytes(4)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "application/json": in_json,
    MEDIA_TYPE: in_trajectories,
}


@pytest.fixture
def tomorrow(tmp_path: Path) -> Iterator[tuple[str, str, set[str]]]:
    """A gateway, a server that has registered there, and the routes that answered in JSON."""
    seen: set[str] = set()
    model = tmp_path / "model"
    task.write_model(model)
    config = GatewayConfig.model_validate(
        {"tokenizer": str(model), "ledger": ":memory:", "sandbox": {"type": "none"}}
    )
    with ExitStack() as stack:

        def serve(app: Any) -> str:
            app.add_middleware(Tomorrow, seen=seen)
            return f"http://127.0.0.1:{stack.enter_context(served(ServiceConfig(), app))}"

        gateway = serve(make_gateway(config))
        tree = {
            "model": {"path": str(model)},
            "backend": {"type": "fake"},
            "gateway": gateway,
            "heartbeat_s": 0.1,
            "weights": {"allow": [str(tmp_path)]},
        }
        own = ServerConfig.model_validate(tree)
        yield gateway, serve(make_app(own, make_generator(own))), seen


@pytest.fixture
def client(tomorrow: tuple[str, str, set[str]]) -> Iterator[RemoteInferenceEngine]:
    client = RemoteInferenceEngine(tomorrow[0], connect_timeout_s=WAIT_S)
    client.initialize()
    eventually(lambda: client.scale().ready == 1, WAIT_S, "the server has registered")
    yield client
    client.destroy()


def test_a_run_goes_well_with_services_that_answer_more(
    tomorrow: tuple[str, str, set[str]], client: RemoteInferenceEngine, tmp_path: Path
) -> None:
    client.attach(ConsumerSpec("default", 2, max_staleness=4, step=-1, version=0))
    assert client.submit([rollout(name) for name in ("a", "b")])[1].is_new
    batch = client.wait(1, WAIT_S)
    assert all(np.isfinite(row.logprobs).all() for row in batch.trajectories)
    client.consumed(batch.rollout_ids, 0, -1)
    assert client.get(batch.rollout_ids[0]).request.reward.name == EXACT.name
    assert client.status().counts.consumed == 2
    assert client.audit().counts.submitted == 4
    assert client.cancel(["b"]) <= 1
    with pytest.raises(NotFound, match="never"):
        client.get("never")

    publisher = make_local_publisher(str(tmp_path / "weights"))
    meta = publisher.publish(1, {"step": torch.ones(4)}.items())
    assert client.update_weights(meta).result(WAIT_S) == 1
    publisher.close()
    assert client.cancel_update(2, "never announced") == 1
    assert client.weights().head == client.pin(1).head == 1
    assert client.pin(None).pinned is client.rollback(1).pinned is None
    assert client.reserve(WeightReservation(name="r", version=1)).failure is None
    client.end_reservation("r")

    parts = [client.workflows(), client.rewards(), client.filters(), client.tools()]
    assert all(part.name for kind in parts for part in kind)
    assert client.score(EXACT, [AnswerToScore(completion="1", data={"answer": "1"})])[0].score == 1
    client.drain_server(client.status().servers[0].server_id, drain=False)
    client.detach()

    answers = tomorrow[2]
    assert {"POST /v1/servers", "POST /v1/generate", "POST /v1/weights/prepare"} <= answers
    assert {"POST /v1/rollouts/wait", "GET /v1/status", "GET /v1/weights"} <= answers


async def test_a_server_alone_answers_more(tomorrow: tuple[str, str, set[str]]) -> None:
    client = RemoteInferenceEngine(tomorrow[1], connect_timeout_s=WAIT_S)
    sampling = SamplingConfig(max_new_tokens=3, ignore_eos=True)
    answer = await client.agenerate(LLMRequest(rid="r", input_ids=(1, 2), gconfig=sampling))
    assert (answer.rid, len(answer.output_tokens)) == ("r", 3)
    await client.aclose()
    await asyncio.to_thread(client.destroy)


def test_a_request_with_an_unknown_field_is_refused_by_name(
    client: RemoteInferenceEngine, tomorrow: tuple[str, str, set[str]]
) -> None:
    body = SubmitRequest(rollouts=(rollout("a"),)).model_dump(mode="json")
    for place in (body, body["rollouts"][0], body["rollouts"][0]["prompt"]):
        place[TOMORROW] = 1
        answer = httpx.post(tomorrow[0] + paths.ROLLOUTS, json=body)
        assert answer.status_code == 422
        assert TOMORROW in answer.json()["message"]
        del place[TOMORROW]
    assert httpx.post(tomorrow[0] + paths.ROLLOUTS, json=body).status_code == 200
