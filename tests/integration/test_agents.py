"""Unmodified OpenAI and Anthropic clients play sessions; what they played is trained token by token."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from headway.contracts.errors import BackendError
from headway.contracts.types import Trajectory
from headway.runtime.outages import Outages
from tests.integration.agent_bench import Bench, Place, open_bench
from tests.unit.gateway.games import check_row, said

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
GUESSES = [8, 4, 6]
TASK = "Find the number."
SCHEMA = {"type": "object", "properties": {"number": {"type": "integer"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "guess", "parameters": SCHEMA}}
RESPONSES_TOOL = {"type": "function", "name": "guess", "parameters": SCHEMA, "strict": False}
ANTHROPIC_TOOL = {"name": "guess", "input_schema": SCHEMA}
OPENING = (
    '<|im_start|>tools\n{"type": "function", "function": {"name": "guess", "parameters": '
    '{"type": "object", "properties": {"number": {"type": "integer"}}}}}<|im_end|>\n'
    f"<|im_start|>user\n{TASK}<|im_end|>\n<|im_start|>assistant\n"
)


def guess(turn: int) -> str:
    """What no JSON library writes: were it tokenised again, it would be other tokens."""
    call = f'{{"name":  "guess",\n"arguments": {{"number":{GUESSES[turn]}}}}}'
    return f"try {turn}\n<tool_call>{call}</tool_call><|im_end|>"


def hint_of(number: int) -> str:
    return "right" if number == 6 else "lower" if number > 6 else "higher"


def play_game(prompt: str) -> str:
    return guess(prompt.count("assistant\n") - 1)


def between(hint: str) -> str:
    """What the template writes between two turns."""
    return f"\n<|im_start|>tool\n{hint}<|im_end|>\n<|im_start|>assistant\n"


def check_game(row: Trajectory, versions: tuple[int, int, int] = (0, 0, 0)) -> None:
    """The row of a whole game, exactly as it was sampled."""
    check_row(
        row,
        OPENING,
        said(guess(0), versions[0]),
        between("lower"),
        said(guess(1), versions[1]),
        between("higher"),
        said(guess(2), versions[2]),
    )


async def chat_game(place: Place, after_turn: Callable[[], None]) -> None:
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for turn, number in enumerate(GUESSES):
        answer = await place.openai.chat.completions.create(
            model="gpt-4o", messages=messages, tools=[CHAT_TOOL]
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == f"try {turn}"
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == (
            "guess",
            f'{{"number": {number}}}',
        )
        messages.append(choice.message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": hint_of(number)})
        after_turn()


async def streamed_chat_game(place: Place, after_turn: Callable[[], None]) -> None:
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for turn, number in enumerate(GUESSES):
        async with place.openai.chat.completions.stream(
            model="gpt-4o",
            messages=messages,
            tools=[CHAT_TOOL],
            stream_options={"include_usage": True},
        ) as stream:
            answer = await stream.get_final_completion()
        message = answer.choices[0].message
        assert message.content == f"try {turn}"
        assert answer.usage.completion_tokens == len(said(guess(turn)).tokens)
        (call,) = message.tool_calls
        messages.append(
            {
                "role": "assistant",
                "content": message.content,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {
                            "name": call.function.name,
                            "arguments": call.function.arguments,
                        },
                    }
                ],
            }
        )
        messages.append({"role": "tool", "tool_call_id": call.id, "content": hint_of(number)})
        after_turn()


async def responses_game(place: Place, after_turn: Callable[[], None]) -> None:
    items: Any = TASK
    last = None
    for number in GUESSES:
        answer = await place.openai.responses.create(
            model="gpt-4o", input=items, tools=[RESPONSES_TOOL], previous_response_id=last
        )
        assert answer.status == "completed"
        *_, call = answer.output
        assert (call.type, call.arguments) == ("function_call", f'{{"number": {number}}}')
        items = [
            {"type": "function_call_output", "call_id": call.call_id, "output": hint_of(number)}
        ]
        last = answer.id
        after_turn()


async def streamed_responses_game(place: Place, after_turn: Callable[[], None]) -> None:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": TASK}]}]
    for turn, number in enumerate(GUESSES):
        async with place.openai.responses.stream(
            model="gpt-4o", input=items, tools=[RESPONSES_TOOL], store=False
        ) as stream:
            answer = await stream.get_final_response()
        message, call = answer.output
        assert message.content[0].text == f"try {turn}"
        items += [message, call]
        items.append(
            {"type": "function_call_output", "call_id": call.call_id, "output": hint_of(number)}
        )
        after_turn()


async def anthropic_game(place: Place, after_turn: Callable[[], None]) -> None:
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for turn, number in enumerate(GUESSES):
        answer = await place.anthropic.messages.create(
            model="claude", max_tokens=200, messages=messages, tools=[ANTHROPIC_TOOL]
        )
        assert answer.stop_reason == "tool_use"
        text, call = answer.content
        assert (text.text, call.input) == (f"try {turn}", {"number": number})
        messages.append({"role": "assistant", "content": answer.content})
        hint = {"type": "tool_result", "tool_use_id": call.id, "content": hint_of(number)}
        messages.append({"role": "user", "content": [hint]})
        after_turn()


async def streamed_anthropic_game(place: Place, after_turn: Callable[[], None]) -> None:
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for turn, number in enumerate(GUESSES):
        async with place.anthropic.messages.stream(
            model="claude", max_tokens=200, messages=messages, tools=[ANTHROPIC_TOOL]
        ) as stream:
            answer = await stream.get_final_message()
        assert answer.stop_reason == "tool_use"
        assert answer.usage.output_tokens == len(said(guess(turn)).tokens)
        text, call = answer.content
        assert (text.text, call.input) == (f"try {turn}", {"number": number})
        messages.append({"role": "assistant", "content": answer.content})
        hint = {"type": "tool_result", "tool_use_id": call.id, "content": hint_of(number)}
        messages.append({"role": "user", "content": [hint]})
        after_turn()


GAMES = {
    "chat": chat_game,
    "chat streamed": streamed_chat_game,
    "responses": responses_game,
    "responses streamed": streamed_responses_game,
    "anthropic": anthropic_game,
    "anthropic streamed": streamed_anthropic_game,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_bench(tmp_path_factory: pytest.TempPathFactory):
    async with open_bench(tmp_path_factory.mktemp("bench"), play_game) as one:
        yield one


@pytest.fixture
def bench(shared_bench: Bench) -> Bench:
    shared_bench.reset()
    return shared_bench


@pytest.mark.parametrize("game", GAMES)
async def test_a_game_is_one_row_of_the_very_tokens_that_were_sampled(bench: Bench, game: str):
    def publish() -> None:
        bench.policy.version += 1

    place = await bench.open()
    await GAMES[game](place, publish)
    (row,) = await place.rows(reward=0.75, turn_rewards={1: -1.0})
    check_game(row, versions=(0, 1, 2))
    assert (row.reward, row.branch, row.stop_reason) == (0.75, 0, "stop")
    assert [turn.reward for turn in row.turns] == [None, -1.0, None]
    assert [turn.note["number"] for turn in row.turns] == [0, 1, 2]
    assert {request.metadata["session_id"] for request in bench.policy.asked} == {
        place.told["session_id"]
    }


@pytest.mark.parametrize("name", ["openai", "anthropic"])
async def test_the_examples_play(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    example, session = import_module(f"{name}_game"), import_module("session")

    def run() -> str:
        with session.open_session(bench.url) as place:
            url = place.openai_url if name == "openai" else place.anthropic_url
            kind = openai.OpenAI if name == "openai" else anthropic.Anthropic
            with kind(base_url=url, api_key=place.api_key) as client:
                place.reward = example.play(client, secret=6)
        return place.rollout_id

    rollout_id = await asyncio.to_thread(run)
    (row,) = await bench.rows(rollout_id)
    assert row.reward == 1.0
    assert len(row.turns) == 3


async def test_an_example_that_breaks_is_recorded_as_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    session = import_module("session")

    def run() -> str:
        with pytest.raises(ZeroDivisionError), session.open_session(bench.url) as place:
            1 / 0  # noqa: B018
        return place.rollout_id

    assert "ZeroDivisionError" in await bench.reason(await asyncio.to_thread(run))


async def test_an_agent_that_the_gateway_calls_plays_each_sample(tmp_path: Path):
    calls: list[dict[str, Any]] = []

    class Agents:
        """Fails its first call, as services do; then plays, and lets the second sample take its time."""

        outages = Outages(1.0)

        async def post_once(self, url: str, body: Any, timeout_s: float) -> Any:
            calls.append(body)
            if len(calls) == 1:
                raise BackendError(f"{url} is restarting")
            place = bench.place(body["session"])
            await chat_game(place, lambda: None)
            if body["sample_index"] == 0:
                return {"reward": 0.5, "details": {"guesses": 3}}
            status, _ = await place.end(reward=1.0)
            assert status == 200
            return {"goes_on": True}

    async with open_bench(tmp_path, play_game, outbound=Agents()) as bench:
        rollout = {
            "rollout_id": "r",
            "prompt": {"group_id": "g", "group_size": 2, "text": TASK, "data": {"secret": 6}},
            "workflow": {"name": "session", "args": {"agent_url": "https://agents.example/play"}},
            "reward": {"name": "given"},
        }
        status, told = await bench.post("/v1/rollouts", {"rollouts": [rollout]})
        assert (status, told["new"]) == (200, [True])
        first, second = await bench.rows("r")
        entry = await bench.service.ledger.get("r")
        assert entry is not None and entry.attempt == 2
    for row in (first, second):
        check_game(row)
    assert (first.reward, first.details, second.reward) == (0.5, {"guesses": 3}, 1.0)
    assert calls[-1]["data"] == {"secret": 6} and calls[-1]["text"] == TASK
