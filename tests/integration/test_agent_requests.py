"""What a session grants and refuses its client, in the words of the client's API, and how it ends."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from tests.integration.agent_bench import Bench, Place, open_bench
from tests.unit.gateway.games import ids_of, logprob_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SHOWN = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def reply(prompt: str) -> str:
    return "one, two, three<|im_end|>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_bench(tmp_path_factory: pytest.TempPathFactory):
    async with open_bench(tmp_path_factory.mktemp("bench"), reply) as one:
        yield one


@pytest.fixture
def bench(shared_bench: Bench) -> Bench:
    shared_bench.reset()
    return shared_bench


async def chat(place: Place, **fields: Any) -> Any:
    return await place.openai.chat.completions.create(
        **{"model": "any", "messages": HELLO, **fields}
    )


async def message(place: Place, **fields: Any) -> Any:
    return await place.anthropic.messages.create(
        **{"model": "any", "max_tokens": 100, "messages": HELLO, **fields}
    )


async def respond(place: Place, **fields: Any) -> Any:
    return await place.openai.responses.create(**{"model": "any", "input": "hello", **fields})


# What is honoured


async def test_sampling_fields_reach_the_policy_within_the_bounds_of_the_session(bench: Bench):
    place = await bench.open(gconfig={"max_new_tokens": 50, "top_k": 9, "temperature": 0.5})
    await chat(place, temperature=0.25, top_p=0.5, seed=7, max_completion_tokens=90)
    await message(place, max_tokens=20, stop_sequences=["xyz"], extra_body={"top_k": 3})
    await respond(place, max_output_tokens=10, top_p=0.125)
    configs = [request.gconfig for request in bench.policy.asked]
    assert [
        (c.max_new_tokens, c.temperature, c.top_p, c.top_k, c.seed, c.stop) for c in configs
    ] == [
        (50, 0.25, 0.5, 9, 7, ()),
        (20, 0.5, 1.0, 3, None, ("xyz",)),
        (10, 0.5, 0.125, 9, None, ()),
    ]


async def test_turns_of_a_seeded_session_differ_in_their_seeds(bench: Bench):
    place = await bench.open(gconfig={"max_new_tokens": 50, "seed": 100})
    await chat(place)
    await chat(place)
    await chat(place, seed=3)
    assert [request.gconfig.seed for request in bench.policy.asked] == [100, 101, 3]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_stop_string_is_cut_from_the_text_and_stays_in_the_row(
    bench: Bench, is_streamed: bool
):
    place = await bench.open()
    if is_streamed:
        stream = await chat(place, stop=[", three"], stream=True)
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = (await chat(place, stop=", three")).choices
        text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == ("one, two", "stop")
    told = await message(place, stop_sequences=[", two"])
    assert (told.content[0].text, told.stop_reason, told.stop_sequence) == (
        "one",
        "stop_sequence",
        ", two",
    )
    first, _ = await place.rows()
    assert bench.tokenizer.decode(first.input_ids.tolist()).endswith("one, two, three")


async def test_what_is_cut_by_its_length_says_so_in_every_api(bench: Bench):
    place = await bench.open()
    assert (await chat(place, max_tokens=3)).choices[0].finish_reason == "length"
    assert (await message(place, max_tokens=3)).stop_reason == "max_tokens"
    answer = await respond(place, max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "one"


async def test_logprobs_are_those_of_the_sampled_tokens(bench: Bench):
    place = await bench.open()
    (choice,) = (await chat(place, logprobs=True, top_logprobs=1)).choices
    tokens = ids_of("one, two, three<|im_end|>")
    assert [one.logprob for one in choice.logprobs.content] == [logprob_of(t) for t in tokens]
    assert choice.logprobs.content[0].top_logprobs[0].token == "o"


async def test_answers_tell_turn_version_usage_and_on_request_tokens(bench: Bench):
    bench.policy.version = 4
    place = await bench.open()
    first = await chat(place)
    second = await chat(place, extra_body={"return_token_ids": True})
    assert (first.metadata, second.metadata) == (
        {"turn": "0", "weight_version": "4"},
        {"turn": "1", "weight_version": "4"},
    )
    assert not hasattr(first.choices[0], "token_ids")
    assert second.choices[0].token_ids == ids_of(reply(""))
    assert second.choices[0].prompt_token_ids == second.prompt_token_ids == ids_of(SHOWN)
    stream = await chat(place, stream=True, extra_body={"return_token_ids": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[0].prompt_token_ids == ids_of(SHOWN)
    assert not any("prompt_token_ids" in chunk.model_extra for chunk in chunks[1:])
    assert (chunks[-1].metadata["turn"], chunks[-1].choices[0].token_ids) == (
        "2",
        ids_of(reply("")),
    )
    assert second.usage.prompt_tokens == len(ids_of(SHOWN))
    assert second.usage.completion_tokens == len(ids_of(reply("")))


async def test_tokens_are_called_by_their_ids_and_neutral_fields_of_engines_are_taken(
    bench: Bench,
):
    place = await bench.open()
    neutral = {"skip_special_tokens": True, "no_stop_trim": False, "separate_reasoning": True}
    more = {"return_tokens_as_token_ids": True, **neutral}
    (choice,) = (await chat(place, logprobs=True, extra_body=more)).choices
    named = [one.token for one in choice.logprobs.content]
    assert named == [f"token_id:{token}" for token in ids_of(reply(""))]


async def test_any_model_name_is_the_policy_and_one_is_listed(bench: Bench):
    place = await bench.open()
    assert [model.id async for model in place.openai.models.list()] == ["policy"]
    assert (await chat(place, model="gpt-4o")).model == "gpt-4o"


async def test_what_a_client_dumps_of_an_answer_extends_its_turn(bench: Bench):
    place = await bench.open()
    said_by_chat = (await chat(place)).choices[0].message.model_dump()
    said_by_chat["reasoning_content"] = None  # as verifiers writes it
    await chat(place, messages=[*HELLO, said_by_chat, {"role": "user", "content": "and?"}])
    dumped = (await message(place)).model_dump()
    more = [*HELLO, {"role": "assistant", "content": dumped["content"]}]
    await message(place, messages=[*more, {"role": "user", "content": "and then?"}])
    items = [item.model_dump() for item in (await respond(place)).output]
    await respond(place, input=[*HELLO, *items, {"role": "user", "content": "so?"}])
    rows = await place.rows()
    assert [len(row.turns) for row in rows] == [2, 2, 2]


# Forks


async def test_a_changed_history_is_a_branch_in_which_the_shared_turn_is_prompt(bench: Bench):
    place = await bench.open()
    told = (await chat(place)).choices[0].message
    for question in ("left?", "right?"):
        await chat(place, messages=[*HELLO, told, {"role": "user", "content": question}])
    first, second = await place.rows()
    shared = len(ids_of(SHOWN)) + len(ids_of(reply("")))
    name = place.told["rollout_id"]
    assert (first.trajectory_id, second.trajectory_id) == (f"{name}/0", f"{name}/0.1")
    assert first.input_ids[:shared].tolist() == second.input_ids[:shared].tolist()
    assert first.loss_mask[:shared].sum() == len(ids_of(reply("")))
    assert not second.loss_mask[:shared].any()
    assert (second.versions[:shared] == -1).all() and not second.logprobs[:shared].any()
    assert second.loss_mask.sum() == len(ids_of(reply("")))
    assert [turn.note["number"] for turn in second.turns] == [2]


async def test_parallel_requests_are_answered_and_become_branches(bench: Bench):
    place = await bench.open()
    bench.policy.gate = asyncio.Event()
    asking = [asyncio.create_task(chat(place)) for _ in range(3)]
    await bench.until(lambda: len(bench.policy.playing) == 3)
    bench.policy.gate.set()
    answers = await asyncio.gather(*asking)
    assert sorted(answer.metadata["turn"] for answer in answers) == ["0", "1", "2"]
    rows = await place.rows()
    assert [row.branch for row in rows] == [0, 1, 2]
    assert {int(row.loss_mask.sum()) for row in rows} == {len(ids_of(reply("")))}


# What is refused


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 2}, "n", "n=1"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "without json_schema"),
        ({"tool_choice": "required"}, "tool_choice", "cannot be forced"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"extra_body": {"nonsense": 1}}, "nonsense", "not a field of this server"),
        ({"messages": []}, "messages", "empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_chat_refuses_by_name(bench: Bench, fields: dict, param: str, words: str):
    place = await bench.open()
    with pytest.raises(openai.BadRequestError, match=words) as refusal:
        await chat(place, **fields)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"background": True}, "background", "while you wait"),
        ({"previous_response_id": "resp_0"}, "previous_response_id", "not an answer of this"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input", "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_responses_refuse_by_name(bench: Bench, fields: dict, param: str, words: str):
    place = await bench.open()
    with pytest.raises(openai.BadRequestError, match=words) as refusal:
        await respond(place, **fields)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: thinking is not"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type: a call cannot be forced"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "cannot be continued"),
        ({"extra_body": {"temperature": -1}}, "temperature: Input should be greater"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "image",
        ),
    ],
    ids=["thinking", "forced call", "prefill", "temperature", "image"],
)
async def test_messages_refuse_by_name(bench: Bench, fields: dict, words: str):
    place = await bench.open()
    with pytest.raises(anthropic.BadRequestError, match=words) as refusal:
        await message(place, **fields)
    assert refusal.value.body["error"]["type"] == "invalid_request_error"


async def test_a_request_without_a_key_is_refused(bench: Bench):
    place = await bench.open()
    url = place.told["openai_url"].removeprefix(bench.url)
    status, told = await bench.post(f"{url}/chat/completions", {"model": "m", "messages": HELLO})
    assert (status, told["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize("key", ["wrong", "other"])
async def test_a_session_opens_to_its_own_key_only(bench: Bench, key: str):
    place, other = await bench.open(), await bench.open()
    given = other.told["api_key"] if key == "other" else key
    with pytest.raises(openai.AuthenticationError, match="key"):
        await chat(Place(place.told, bench, place.openai.copy(api_key=given), place.anthropic))
    with pytest.raises(anthropic.AuthenticationError, match="key"):
        await message(Place(place.told, bench, place.openai, place.anthropic.copy(api_key=given)))
    status, told = await place.end(key=given, reward=1.0)
    assert (status, told["code"]) == (401, "unauthorized")
    assert bench.policy.asked == []


async def test_a_session_that_nobody_knows_is_not_found(bench: Bench):
    place = await bench.open()
    base = place.told["openai_url"].replace(place.told["session_id"], "session-0")
    with pytest.raises(openai.NotFoundError, match="not known here"):
        await chat(Place(place.told, bench, place.openai.copy(base_url=base), place.anthropic))


async def test_more_turns_than_allowed_are_refused_and_the_session_may_end(tmp_path: Path):
    async with open_bench(tmp_path, reply, max_turns=2) as bench:
        place = await bench.open()
        await chat(place)
        await chat(place)
        with pytest.raises(openai.BadRequestError, match=r"sessions.max_turns=2; end the session"):
            await chat(place)
        assert len(await place.rows()) == 2


async def test_more_sessions_than_allowed_come_later(tmp_path: Path):
    async with open_bench(tmp_path, reply, max_sessions=1) as bench:
        place = await bench.open()
        status, told = await bench.post("/v1/sessions", {"rollout_id": "second"})
        assert (status, told["code"], told["retryable"]) == (429, "queue_full", True)
        assert int(told["headers"]["Retry-After"]) >= 1
        assert await bench.service.ledger.get("second") is None
        await chat(place)
        await place.rows()
        await bench.open(rollout_id="second")


async def test_a_session_waits_for_capacity_and_then_comes_later(tmp_path: Path):
    async with open_bench(tmp_path, reply, executor={"max_concurrent": 1}) as bench:
        place = await bench.open()
        asked = {"rollout_id": "second", "timeout_s": 0.05}
        status, told = await bench.post("/v1/sessions", asked)
        assert (status, told["code"]) == (429, "queue_full")
        assert "keeps its place" in told["message"]
        waiting = asyncio.create_task(bench.open(rollout_id="second", gconfig={}))
        await chat(place)
        await place.rows()
        await chat(await waiting)


# How it ends


async def test_asking_again_finds_the_same_session_until_it_ends(bench: Bench):
    place = await bench.open(rollout_id="again")
    again = await bench.open(rollout_id="again")
    assert {**again.told, "expires_in_s": 0, "headers": 0} == {
        **place.told,
        "expires_in_s": 0,
        "headers": 0,
    }
    status, told = await bench.post("/v1/sessions", {"rollout_id": "again", "data": {"other": 1}})
    assert (status, told["code"]) == (409, "conflict")
    await chat(place)
    await place.rows()
    body = {"rollout_id": "again", "gconfig": {"max_new_tokens": 200}}
    status, told = await bench.post("/v1/sessions", body)
    assert (status, told["code"]) == (410, "session_ended")


async def test_an_end_is_told_once_and_may_be_repeated(bench: Bench):
    place = await bench.open()
    await chat(place)
    for _ in range(2):
        status, told = await place.end(reward=0.5)
        assert (status, told["state"], told["rollout_id"]) == (
            200,
            "ready",
            place.told["rollout_id"],
        )
    status, told = await place.end(reward=0.25)
    assert (status, told["code"]) == (409, "conflict")
    (row,) = await bench.rows(place.told["rollout_id"])
    assert row.reward == 0.5


async def test_nothing_is_played_after_the_end(bench: Bench):
    place = await bench.open()
    await chat(place)
    await place.end(reward=0.5)
    with pytest.raises(openai.APIStatusError, match="has ended") as late:
        await chat(place)
    assert (late.value.status_code, late.value.code) == (410, "session_ended")
    with pytest.raises(anthropic.APIStatusError, match="has ended") as late:
        await message(place)
    assert late.value.status_code == 410


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({}, "submitted without a reward"),
        ({"reward": 1.0, "turn_rewards": {"1": 1.0}}, r"the turns \[1\]; 1 were made"),
        ({"reward": "NaN"}, "finite"),
    ],
    ids=["no reward", "no such turn", "not finite"],
)
async def test_an_end_that_says_nothing_true_is_refused(bench: Bench, end: dict, words: str):
    place = await bench.open()
    await chat(place)
    status, told = await place.end(**end)
    assert status in (400, 422)
    assert re.search(words, told["message"])
    assert len(await place.rows()) == 1


async def test_a_session_without_turns_may_only_fail(bench: Bench):
    place = await bench.open()
    status, told = await place.end(reward=1.0)
    assert (status, "no turn was made" in told["message"]) == (400, True)
    status, told = await place.end(failed="the browser crashed")
    assert (status, told["state"]) == (200, "failed")
    assert (
        await bench.reason(place.told["rollout_id"])
        == "WorkflowError: the agent failed: the browser crashed"
    )


async def test_the_submitted_reward_judges_the_last_answer(bench: Bench):
    place = await bench.open(
        reward={"name": "exact", "args": {"pattern": "[a-z]+$"}}, data={"answer": "three"}
    )
    await chat(place)
    (row,) = await place.rows(reward=None)
    assert row.reward == 1.0


async def test_a_session_that_hangs_fails_after_its_idle_time(tmp_path: Path):
    async with open_bench(tmp_path, reply, idle_timeout_s=0.2) as bench:
        place = await bench.open()
        bench.policy.gate = asyncio.Event()
        asking = asyncio.create_task(chat(place))
        await bench.until(lambda: bench.policy.playing)
        await asyncio.sleep(0.5)  # longer than the idle time: what is being answered is not idle
        bench.policy.gate.set()
        await asking
        assert "sessions.idle_timeout_s=0.2" in await bench.reason(place.told["rollout_id"])
        with pytest.raises(openai.APIStatusError, match="has ended"):
            await chat(place)


async def test_a_session_that_never_ends_is_cut_by_the_rollouts_time(tmp_path: Path):
    async with open_bench(tmp_path, reply, executor={"rollout_timeout_s": 0.3}) as bench:
        place = await bench.open()
        assert 0 < place.told["expires_in_s"] <= 0.3
        bench.policy.gate = asyncio.Event()
        with pytest.raises(openai.APIStatusError) as late:
            await chat(place)
        assert late.value.status_code == 410
        assert "still running after 0.3 s" in await bench.reason(place.told["rollout_id"])
        assert not bench.policy.playing


async def test_the_end_overtakes_a_request_in_flight(bench: Bench):
    place = await bench.open()
    await chat(place)
    bench.policy.gate = asyncio.Event()
    asking = asyncio.create_task(chat(place))
    await bench.until(lambda: bench.policy.playing)
    assert len(await place.rows()) == 1
    with pytest.raises(openai.APIStatusError, match="ended while this was being answered"):
        await asking
    assert not bench.policy.playing


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_goes_away_aborts_its_generation(bench: Bench, is_streamed: bool):
    place = await bench.open()
    bench.policy.gate = asyncio.Event()
    asking = asyncio.create_task(chat(place, stream=is_streamed))
    await bench.until(lambda: bench.policy.playing)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await bench.until(lambda: not bench.policy.playing)
    bench.policy.gate.set()
    await chat(place)
    (row,) = await place.rows()
    assert [turn.note["number"] for turn in row.turns] == [0]


async def test_a_stream_that_waits_says_so_and_tells_late_failures(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.sessions.answers.WAIT_S", 0.02)
    place = await bench.open()
    await chat(place)
    bench.policy.gate = asyncio.Event()
    streams = [await chat(place, stream=True), await message(place, stream=True)]
    events = await respond(place, stream=True)
    await bench.until(lambda: len(bench.policy.playing) == 3)
    assert len(await place.rows()) == 1
    for stream, error in zip(streams, [openai.APIError, anthropic.APIError], strict=True):
        with pytest.raises(error, match="ended while"):
            assert [event async for event in stream] == []
    (failure,) = [event async for event in events]
    assert (failure.type, failure.code) == ("error", "session_ended")


async def test_a_version_beyond_its_bounds_ends_the_session(bench: Bench):
    place = await bench.open(versions={"max_version": 0})
    await chat(place)
    bench.policy.version = 1
    with pytest.raises(openai.ConflictError, match="max_version=0"):
        await chat(place)
    assert "max_version=0" in await bench.reason(place.told["rollout_id"])


async def test_siblings_of_a_group_are_sessions_of_their_own(bench: Bench):
    places = [await bench.open(group_id="g") for _ in range(2)]
    for place in places:
        await chat(place)
        await place.rows()
    assert {request.metadata["group_id"] for request in bench.policy.asked} == {"g"}
    assert len({request.metadata["session_id"] for request in bench.policy.asked}) == 2
