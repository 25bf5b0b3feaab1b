"""Who gets a session, for how long it is remembered, and what its workflow makes of its end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.ledger.sqlite import SqliteLedger
from gateway.sessions import sessions as desk
from gateway.sessions.chat import Chat, TurnRequest
from gateway.sessions.session_directory import SessionDirectory
from gateway.sessions.sessions import Sessions
from gateway.trajectories.sample import Sample
from gateway.workflows.base import RolloutContext
from gateway.workflows.session import SessionArgs, SessionWorkflow
from headway.contracts.config.gateway import SessionsConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import (
    ConfigError,
    NotFound,
    QueueFull,
    SessionEnded,
    Unauthorized,
    WorkflowError,
)
from headway.contracts.http.sessions import SessionEndRequest
from headway.contracts.types import Prompt, RewardResult
from headway.dialects.error_shapes import InvalidField
from headway.runtime.outages import Outages
from tests.unit.gateway.games import NOTHING, Judge, ScriptedPolicy, byte_tokenizer, said

SAMPLE = Sample("r", Prompt(group_id="g", text="2+2", data={"answer": "4"}), 0)
HELLO = TurnRequest([{"role": "user", "content": "hello"}], SamplingConfig())


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    policy = ScriptedPolicy([said("4<|im_end|>")] * 4)
    return Chat(byte_tokenizer(tmp_path / "tokenizer"), SamplingConfig(), policy)


def sessions(**config: Any) -> Sessions:
    return Sessions(SessionsConfig(**config), lifetime_s=60.0)


async def test_a_session_is_found_by_its_key_and_heard_of_after_its_end(chat: Chat):
    house = sessions()
    async with house.open(SAMPLE, chat) as one, house.open(SAMPLE, chat) as other:
        assert house.find(one.id, one.key) is one
        assert len(bytes.fromhex(one.key)) == 16 and one.key != other.key
        for key in (other.key, "", "é"):
            with pytest.raises(Unauthorized):
                house.find(one.id, key)
        with pytest.raises(NotFound, match="open it again with its rollout_id"):
            house.find("session-0", one.key)
    assert house.num_open == 0
    with pytest.raises(SessionEnded, match="has ended"):
        await house.find(one.id, one.key).run_turn(HELLO)


async def test_the_oldest_end_is_forgotten(chat: Chat, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(desk, "REMEMBERED", 1)
    house = sessions()
    known = []
    for _ in range(2):
        async with house.open(SAMPLE, chat) as session:
            known.append(session)
    with pytest.raises(NotFound):
        house.find(known[0].id, known[0].key)
    assert house.find(known[1].id, known[1].key) is known[1]


async def test_a_workflow_waits_for_a_place_and_a_client_is_told_to_come_later(chat: Chat):
    house = sessions(max_sessions=1)
    async with house.open(SAMPLE, chat) as first:
        with (
            pytest.raises(QueueFull, match=r"sessions.max_sessions=1; try again later"),
            house.expecting(),
        ):
            raise AssertionError
        place = house.open(SAMPLE, chat)
        entering = asyncio.ensure_future(place.__aenter__())
        waiting = asyncio.ensure_future(house.until_open("other", "http://gate", timeout_s=5.0))
        await asyncio.sleep(0)
        assert not entering.done()
    second = await asyncio.wait_for(entering, 5.0)
    assert house.of_rollout("r") is second is not first
    await place.__aexit__(None, None, None)
    waiting.cancel()


async def test_what_nobody_opens_is_not_waited_for_forever():
    assert await sessions().until_open("r", "http://gate", timeout_s=0.0) is None


async def test_an_address_is_configured_or_learned(chat: Chat):
    house = sessions()
    async with house.open(SAMPLE, chat) as session:
        with pytest.raises(ConfigError, match=r"set sessions.public_url"):
            house.describe(session)
        house.address = "http://127.0.0.1:1"
        assert house.describe(session).openai_url.startswith("http://127.0.0.1:1/v1/sessions/")
        told = house.describe(session, "http://asked:2/")
        assert told.openai_url == f"http://asked:2/v1/sessions/{session.id}/openai/v1"
        house = sessions(public_url="https://agents.example/gate")
        told = house.describe(session, "http://asked:2/")
        assert told.anthropic_url == (
            f"https://agents.example/gate/v1/sessions/{session.id}/anthropic"
        )


class Agent:
    """An outbound call that answers what it is told to."""

    def __init__(self, house: Sessions, answer: Any, turns: int = 1) -> None:
        self._house = house
        self._answer = answer
        self._turns = turns
        self.calls: list[Any] = []
        self.outages = Outages(1.0)

    async def post_once(self, url: str, body: Any, timeout_s: float) -> Any:
        self.calls.append((url, body, timeout_s))
        told = body["session"]
        session = self._house.find(told["session_id"], told["api_key"])
        for _ in range(self._turns):
            await session.run_turn(HELLO)
        return self._answer


def workflow(chat: Chat, **args: Any) -> SessionWorkflow:
    return SessionWorkflow(chat.tokenizer, chat.gconfig, SessionArgs(**args))


async def play_agent(chat: Chat, answer: Any, turns: int = 1, **args: Any):
    house = sessions()
    house.address = "http://gate"
    agent = Agent(house, answer, turns)
    judge = Judge(lambda text: RewardResult(float(text == "4"), {"by": "judge"}))
    services = replace(NOTHING, outbound=agent)
    context = RolloutContext(chat.generate, judge, services, house)
    rows = await workflow(chat, agent_url="http://agent/play", **args).run(SAMPLE, context)
    return rows, agent, judge


@pytest.mark.parametrize("answer", [None, {}, {"details": {"seen": 1}}], ids=["null", "{}", "more"])
async def test_an_agent_that_gives_no_reward_is_judged_by_its_last_answer(chat: Chat, answer: Any):
    (row,), agent, judge = await play_agent(chat, answer, agent_timeout_s=7.0)
    assert (row.reward, row.details["by"]) == (1.0, "judge")
    ((url, body, timeout_s),) = agent.calls
    assert (url, timeout_s) == ("http://agent/play", 7.0)
    assert (body["text"], body["messages"], body["data"]) == ("2+2", None, {"answer": "4"})
    (judged,) = judge.answers
    assert (judged.completion, judged.data) == ("4", {"answer": "4"})
    assert [*judged.prompt_ids, *judged.completion_ids] == row.input_ids.tolist()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"failed": "no browser"}, "the agent failed: no browser"),
        ({"rewards": 1}, "which ends no session"),
        ([1], "which ends no session"),
        ({"reward": float("inf")}, "which ends no session"),
    ],
    ids=["failed", "unknown field", "list", "infinite"],
)
async def test_an_agent_that_answers_badly_fails_its_rollout(chat: Chat, answer: Any, words: str):
    with pytest.raises(WorkflowError, match=words):
        await play_agent(chat, answer)


async def test_an_agent_that_played_nothing_fails_its_rollout(chat: Chat):
    with pytest.raises(InvalidField, match="no turn was made"):
        await play_agent(chat, {"reward": 1.0}, turns=0)


async def test_an_agent_that_goes_on_and_never_ends_fails_by_its_idle_time(chat: Chat):
    house = sessions(idle_timeout_s=0.05)
    house.address = "http://gate"
    services = replace(NOTHING, outbound=Agent(house, {"goes_on": True}))
    context = RolloutContext(chat.generate, Judge(lambda _: RewardResult(0.0)), services, house)
    with pytest.raises(WorkflowError, match=r"sessions.idle_timeout_s=0.05"):
        await workflow(chat, agent_url="http://agent/play").run(SAMPLE, context)


async def test_a_service_without_sessions_says_so(chat: Chat):
    context = RolloutContext(chat.generate, Judge(lambda _: RewardResult(0.0)), NOTHING)
    with pytest.raises(ConfigError, match="keeps no sessions"):
        await workflow(chat).run(SAMPLE, context)


async def test_the_same_end_is_told_again_and_another_is_not(chat: Chat):
    async with sessions().open(SAMPLE, chat) as session:
        await session.run_turn(HELLO)
        session.end(SessionEndRequest(reward=1.0))
        session.end(SessionEndRequest(reward=1.0))
        with pytest.raises(Exception, match="another reward or reason"):
            session.end(SessionEndRequest(reward=0.0))
        assert (await session.until_end()).reward == 1.0


async def test_gateways_that_share_a_ledger_find_each_others_sessions(chat: Chat):
    ledger = SqliteLedger(":memory:")
    await ledger.open("one", 30.0)
    config = [SessionsConfig(public_url=f"https://gate-{name}.example") for name in "ab"]
    here, there = (Sessions(one, 60.0, SessionDirectory(ledger)) for one in config)
    looking = asyncio.create_task(here.until_open("r", "http://here", timeout_s=10.0))
    async with there.open(SAMPLE, chat) as session:
        told = await looking
        assert told is not None and told.api_key == session.key
        assert told.end_url == f"https://gate-b.example/v1/sessions/{session.id}/end"
        neighbour = replace(SAMPLE, rollout_id="s")
        async with here.open(neighbour, chat), here.open(SAMPLE, chat) as newer:
            found = await SessionDirectory(ledger).find("r")
            assert found is not None and found.session_id == newer.id
    assert await SessionDirectory(ledger).find("r") is None
    assert await SessionDirectory(ledger).find("s") is None
    await ledger.close()
