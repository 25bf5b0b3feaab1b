"""Rollouts over HTTP, with plain requests: submit, wait, look, stream, cancel, requeue."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn

from gateway.service.app import create_app
from headway.contracts.codec import decode_groups
from headway.contracts.errors import DataError
from headway.contracts.http import paths
from tests.unit.gateway.generators import fails, never


@pytest.fixture
async def serve(open_service):
    """Serves a bench's service on a real port; gives the bench and a client."""
    async with asyncio.TaskGroup() as tasks:
        closers = []

        async def served(*args, **fields):
            bench = await open_service(*args, **fields)

            @asynccontextmanager
            async def opened():
                yield bench.service

            listener = socket.create_server(("127.0.0.1", 0))
            app = create_app("test", opened, 1 << 20)
            server = uvicorn.Server(uvicorn.Config(app, log_config=None))
            serving = tasks.create_task(server.serve(sockets=[listener]))
            await bench.until(lambda: server.started)
            url = "http://{}:{}".format(*listener.getsockname())
            client = httpx.AsyncClient(base_url=url, timeout=20.0)

            async def close():
                await client.aclose()
                server.should_exit = True
                await serving
                listener.close()

            closers.append(close)
            return bench, client

        yield served
        for close in closers:
            await close()


def rollout(name: str, size: int = 1, **fields) -> dict:
    prompt = {
        "group_id": f"g-{name}",
        "group_size": size,
        "input_ids": [1, 2, 3],
        "data": {"answer": "world"},
    }
    return {"rollout_id": name, "prompt": prompt, "reward": {"name": "exact"}, **fields}


async def submit(client: httpx.AsyncClient, *rollouts: dict) -> list[bool]:
    answer = await client.post(paths.ROLLOUTS, json={"rollouts": rollouts})
    assert answer.status_code == 200, answer.text
    return answer.json()["new"]


async def wait(client: httpx.AsyncClient, count: int, delivery_id: str = "d", **fields):
    body = {"delivery_id": delivery_id, "count": count, "timeout_s": 10, **fields}
    return await client.post(paths.ROLLOUTS_WAIT, json=body)


async def test_results_come_as_json_or_as_columns(serve):
    _, client = await serve()
    assert await submit(client, rollout("a", 2), rollout("b")) == [True, True]
    assert await submit(client, rollout("a", 2)) == [False]
    answer = await wait(client, 1, "json", format="json")
    (group,) = answer.json()["groups"]
    assert (group["rollout_id"], group["group_id"]) == ("a", "g-a")
    first = group["trajectories"][0]
    assert first["input_ids"] == [1, 2, 3, 7]
    assert first["loss_mask"] == [False, False, False, True]
    assert (first["versions"], first["reward"]) == ([-1, -1, -1, 0], 1.0)
    again = await wait(client, 1, "json")  # the same delivery, in the other format
    assert [g.rollout_id for g in decode_groups(again.content)] == ["a"]
    assert [g.rollout_id for g in decode_groups((await wait(client, 1, "d2")).content)] == ["b"]


async def test_nothing_ready_is_an_empty_answer(serve):
    _, client = await serve(never)
    await submit(client, rollout("a"))
    answer = await wait(client, 1, timeout_s=0)
    assert (answer.status_code, answer.headers[paths.READY_HEADER]) == (204, "0")


async def test_a_rollout_can_be_looked_at(serve):
    _, client = await serve()
    await submit(client, rollout("a", 2, consumer="me"))
    await wait(client, 1, consumer="me")
    view = (await client.get(paths.ROLLOUT.format(rollout_id="a"))).json()
    assert (view["summary"]["state"], view["summary"]["mean_reward"]) == ("delivered", 1.0)
    assert [event["event"] for event in view["events"]] == [
        "submit",
        "lease",
        "complete",
        "deliver",
    ]
    assert view["group"]["trajectories"][1]["tokens"][-1].strip() == "world"
    assert view["request"]["consumer"] == "me"
    brief = await client.get(paths.ROLLOUT.format(rollout_id="a"), params={"view": "summary"})
    assert brief.json() == {**view, "group": None}
    wrong = await client.get(paths.ROLLOUT.format(rollout_id="a"), params={"view": "all"})
    assert wrong.status_code == 422
    missing = await client.get(paths.ROLLOUT.format(rollout_id="nobody"))
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


async def test_listings_are_paged_and_filtered(serve):
    bench, client = await serve()
    await submit(client, *(rollout(f"r{i}", consumer=f"c{i % 2}") for i in range(5)))
    await bench.until_counts(ready=5)
    page = (await client.get(paths.ROLLOUTS, params={"limit": 3})).json()
    assert [line["rollout_id"] for line in page["rollouts"]] == ["r4", "r3", "r2"]
    rest = await client.get(paths.ROLLOUTS, params={"limit": 3, "before": page["before"]})
    assert [line["rollout_id"] for line in rest.json()["rollouts"]] == ["r1", "r0"]
    assert rest.json()["before"] is None
    found = await client.get(paths.ROLLOUTS, params={"consumer": "c1", "state": "ready"})
    assert [line["rollout_id"] for line in found.json()["rollouts"]] == ["r3", "r1"]
    wrong = await client.get(paths.ROLLOUTS, params={"state": "lost"})
    assert wrong.status_code == 422


async def test_cancelling_ends_what_waits_and_what_is_in_play(serve):
    bench, client = await serve(never, max_concurrent=1)
    await submit(client, rollout("plays"), rollout("waits"))
    await bench.until(lambda: bench.generator.playing)
    body = {"rollout_ids": ["plays", "waits", "unknown"], "reason": "not needed"}
    assert (await client.post(paths.ROLLOUTS_CANCEL, json=body)).json() == {"cancelled": 2}
    await bench.until(lambda: not bench.generator.playing)
    assert (await bench.ledger.counts()).cancelled == 2
    answer = await wait(client, 1, rollout_ids=["plays"])
    assert (answer.status_code, answer.json()["code"]) == (409, "rollouts_failed")
    assert "'plays' is cancelled: not needed" in answer.json()["message"]
    assert (await client.post(paths.ROLLOUTS_CANCEL, json=body)).json() == {"cancelled": 0}


async def test_what_a_consumer_that_is_gone_left_can_be_ended(serve):
    bench, client = await serve()
    await submit(client, *(rollout(name, 2, consumer="gone") for name in "ab"), rollout("c"))
    assert (await wait(client, 1, consumer="gone")).status_code == 200
    await bench.until_counts(delivered=2, ready=3)
    body = {"consumer": "gone"}
    assert (await client.request("DELETE", paths.CONSUMER, json=body)).json() == {"cancelled": 4}
    await bench.until_counts(cancelled=4, ready=1)
    again = await wait(client, 1, consumer="gone", delivery_id="d", timeout_s=0)
    assert again.status_code == 204
    answer = await client.request("DELETE", paths.CONSUMER, json=body)
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert "'gone' is not attached, and has no open rollouts" in answer.json()["message"]
    assert (await wait(client, 1, "d2")).status_code == 200


async def test_what_failed_can_be_played_once_more(serve):
    bench, client = await serve(fails(1, DataError), error_budget=5)
    await submit(client, rollout("a"))
    await bench.until_counts(failed=1)
    body = {"rollout_ids": ["a"]}
    assert (await client.post(paths.LEDGER_REQUEUE, json=body)).json() == {"requeued": 1}
    assert [g.rollout_id for g in decode_groups((await wait(client, 1)).content)] == ["a"]


async def test_groups_stream_in_order_and_a_reader_goes_on_where_it_was(serve):
    _, client = await serve()
    await submit(client, *(rollout(name) for name in "abc"))
    params = {"stream_id": "s1"}

    async def read(count: int, headers: dict[str, str]) -> list[tuple[str, str]]:
        seen = []
        async with client.stream(
            "GET", paths.ROLLOUTS_STREAM, params=params, headers=headers
        ) as answer:
            number = ""
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    number = line[4:]
                if line.startswith("data: "):
                    seen.append((number, json.loads(line[6:])["rollout_id"]))
                    if len(seen) == count:
                        return seen
        return seen

    assert await read(2, {}) == [("0", "a"), ("1", "b")]
    assert await read(2, {"last-event-id": "0"}) == [("1", "b"), ("2", "c")]


async def test_a_full_queue_asks_to_come_back(serve):
    _, client = await serve(never, max_queued=4, max_concurrent=2)
    answer = await client.post(paths.ROLLOUTS, json={"rollouts": [rollout("a", 2)] * 1})
    assert answer.status_code == 200
    rollouts = [rollout(f"r{i}", 2) for i in range(4)]
    answer = await client.post(paths.ROLLOUTS, json={"rollouts": rollouts})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["retryable"] is True


async def test_the_catalog_tells_the_schemas_of_arguments(serve):
    _, client = await serve()
    workflows = {part["name"]: part for part in (await client.get(paths.WORKFLOWS)).json()["parts"]}
    assert workflows["single_turn"]["version"] == "1"
    assert workflows["single_turn"]["args_schema"]["type"] == "object"
    rewards = {part["name"]: part for part in (await client.get(paths.REWARDS)).json()["parts"]}
    assert {"answer_key", "pattern"} <= set(rewards["exact"]["args_schema"]["properties"])
    filters = {part["name"]: part for part in (await client.get(paths.FILTERS)).json()["parts"]}
    assert {"reward_spread", "reward_range", "length"} <= filters.keys()
    assert filters["length"]["args_schema"]["properties"]
    tools = {part["name"]: part for part in (await client.get(paths.TOOLS)).json()["parts"]}
    assert {"url", "function"} <= set(tools["http"]["args_schema"]["properties"])
    assert all(part["summary"] for parts in (filters, tools) for part in parts.values())


@pytest.mark.parametrize(
    ("fields", "status", "told"),
    [
        ({"workflow": {"name": "os.system"}}, 404, "no workflow named 'os.system'"),
        ({"workflow": {"name": "single_turn", "version": "9"}}, 400, "version '1' here"),
        ({"workflow": {"name": "single_turn", "args": {"x": 1}}}, 400, "x"),
        ({"reward": {"name": "exact", "args": {"x": 1}}}, 400, "x"),
        ({"filter": {"name": "nothing"}}, 404, "no filter named 'nothing'"),
        ({"priority": 9999}, 422, "priority"),
        ({"timeout_s": 0}, 422, "timeout_s"),
        ({"versions": {"min_version": 3, "max_version": 2}}, 422, "min_version=3 exceeds"),
        ({"callback": "http://x"}, 422, "callback"),
    ],
)
async def test_what_cannot_be_played_is_refused_by_name(serve, fields, status, told):
    bench, client = await serve()
    answer = await client.post(paths.ROLLOUTS, json={"rollouts": [rollout("a", **fields)]})
    assert (answer.status_code, told in answer.json()["message"]) == (status, True), answer.text
    assert (await bench.ledger.counts()).submitted == 0
