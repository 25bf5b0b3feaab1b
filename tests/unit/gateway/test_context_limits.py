"""Rollouts that no server can hold: refused when they are submitted, else ended with the reason."""

from __future__ import annotations

import pytest

from headway.contracts.config.base import WorkflowRef
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import RequestTooLong
from headway.contracts.http.servers import ServerStatus
from headway.contracts.types import Prompt
from tests.unit.gateway.generators import fails

PROMPT = Prompt(group_id="g", text=" ".join(["x"] * 15))
"""16 tokens, with the one in front."""


def servers(*limits: int | None) -> list[ServerStatus]:
    return [
        ServerStatus(
            server_id=f"s{place}",
            url=f"http://s{place}",
            version=0,
            state="ready",
            max_context_tokens=limit,
        )
        for place, limit in enumerate(limits)
    ]


def asking(max_new_tokens: int, **fields) -> dict:
    return {"gconfig": SamplingConfig(max_new_tokens=max_new_tokens), "prompt": PROMPT, **fields}


async def test_a_prompt_that_no_server_can_hold_is_refused_and_nothing_is_stored(open_service):
    bench = await open_service()
    bench.generator.servers = servers(16, 20)
    await bench.submit("fits", **asking(4))
    seen = (
        "rollout 'long': 16 prompt tokens \\+ max_new_tokens=5 exceed the context of 20; .* lower "
        "max_new_tokens, or .*backend.max_context"
    )
    with pytest.raises(RequestTooLong, match=seen):
        await bench.submit("long", **asking(5))
    with pytest.raises(RequestTooLong, match="rollout 'ids': 3 prompt tokens"):
        await bench.submit("ids", gconfig=SamplingConfig(max_new_tokens=18))
    assert (await bench.ledger.counts()).submitted == 1
    status = await bench.service.status()
    assert (status.smallest_context_tokens, status.largest_context_tokens) == (16, 20)


async def test_a_rollout_that_is_known_may_be_sent_again_whatever_servers_hold_by_then(
    open_service,
):
    bench = await open_service()
    await bench.submit("long", **asking(1000))
    bench.generator.servers = servers(20)
    await bench.submit("long", **asking(1000))
    assert (await bench.ledger.counts()).submitted == 1


@pytest.mark.parametrize("limits", [(), (None,), (8, None)])
async def test_what_may_fit_for_all_that_is_known_is_taken(open_service, limits):
    bench = await open_service()
    bench.generator.servers = servers(*limits)
    await bench.submit("long", **asking(1000))
    assert (await bench.service.status()).largest_context_tokens is None


@pytest.mark.parametrize(
    "workflow",
    [
        WorkflowRef(name="multi_turn", args={"max_tokens": 20}),
        WorkflowRef(name="multi_turn", args={"template_args": {"enable_thinking": False}}),
        WorkflowRef(name="session"),
    ],
    ids=["bounded row", "rendered otherwise", "session"],
)
async def test_workflows_that_may_ask_for_less_are_taken(open_service, workflow):
    bench = await open_service()
    bench.generator.servers = servers(20)
    await bench.submit("r", **asking(1000, workflow=workflow))


async def test_a_row_whose_bound_leaves_no_room_is_refused(open_service):
    bench = await open_service()
    bench.generator.servers = servers(16)
    workflow = WorkflowRef(name="multi_turn", args={"max_tokens": 30})
    with pytest.raises(RequestTooLong, match="16 prompt tokens \\+ max_new_tokens=14 exceed"):
        await bench.submit("r", **asking(1000, workflow=workflow))


async def test_what_a_server_refuses_fails_with_its_reason_and_is_not_played_again(open_service):
    bench = await open_service(fails(1, RequestTooLong))
    await bench.submit("r", **asking(4))
    await bench.until_counts(failed=1)
    entry = await bench.ledger.get("r")
    assert entry is not None
    assert "RequestTooLong: attempt 1 failed" in entry.reason
    assert sum(bench.generator.attempts.values()) == 1
