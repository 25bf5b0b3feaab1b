"""Turns against a real service over loopback."""

import json
from contextlib import asynccontextmanager

import jsonschema
import pytest
from fastapi import FastAPI, Request, Response

from gateway.components.shared_services import NoOutbound, NoSandbox, SharedServices
from gateway.trajectories.sample import Sample
from gateway.workflows import callback
from gateway.workflows.base import RolloutContext, make_workflow
from headway.contracts.config.base import WorkflowRef
from headway.contracts.config.gateway import OutboundConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import BackendError, ConfigError, Forbidden, WorkflowError
from headway.contracts.types import Prompt, RewardResult
from headway.runtime.outbound import HttpOutbound
from tests.unit.gateway.app_server import served
from tests.unit.gateway.games import (
    Judge,
    ScriptedPolicy,
    byte_tokenizer,
    chat_prompt,
    check_row,
    said,
)

PROMPT = chat_prompt("guess", data={"secret": 4})
OPENING = "<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n"
GOES_ON = {"action": "continue", "messages": [{"role": "user", "content": "higher"}]}
BRIDGE = "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
END = {"action": "end", "reward": 0.5}


def schemas() -> tuple[dict, dict]:
    """Of calls and answers, as the module's documentation writes them."""
    blocks = callback.__doc__.split("\n\n")
    call, answer = (json.loads(b) for b in blocks if b.startswith("    {"))
    return call, answer


CALL_SCHEMA, ANSWER_SCHEMA = schemas()


class Service:
    """Gives one answer after the other; a number is a status without one."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.calls: list[dict] = []

    async def answer(self, request: Request) -> Response:
        self.calls.append(await request.json())
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return Response("not now", status_code=answer)
        return Response(json.dumps(answer), media_type="application/json")

    @asynccontextmanager
    async def open(self):
        """The URL of this service, and what may call it."""
        app = FastAPI()
        app.add_route("/turn", self.answer, methods=["POST"])
        async with served(app) as port:
            url = f"http://127.0.0.1:{port}/turn"
            outbound = HttpOutbound(OutboundConfig(allow=(url,), allow_private=True))
            try:
                yield url, SharedServices(NoSandbox(), outbound)
            finally:
                await outbound.aclose()


@pytest.fixture
def tokenizer(tmp_path):
    return byte_tokenizer(tmp_path / "bytes")


async def play(tokenizer, service, replies, prompt=PROMPT, sampling=None, **args):
    policy = ScriptedPolicy(replies)
    judge = Judge(lambda text: RewardResult(0.25, {"saw": text}, "wrong_answer"))
    async with service.open() as (url, services):
        ref = WorkflowRef(name="callback", args={"url": url, **args})
        workflow = make_workflow(ref, tokenizer, SamplingConfig(**(sampling or {})))
        (row,) = await workflow.run(
            Sample("r1", prompt, 2), RolloutContext(policy, judge, services)
        )
    return row


async def test_the_service_answers_every_turn_and_tells_the_reward(tokenizer):
    service = Service(
        {**GOES_ON, "reward": 0.1},
        {**END, "turn_rewards": {"1": 0.75}, "details": {"guesses": 2}},
    )
    first, second = said("3<|im_end|>", 5, is_swapped=True), said("4<|im_end|>", 8)
    row = await play(tokenizer, service, [first, second])
    check_row(row, OPENING, first, BRIDGE, second)
    assert (row.reward, row.verdict, row.details) == (0.5, "scored", {"guesses": 2})
    assert [turn.reward for turn in row.turns] == [0.1, 0.75]
    assert row.turns[0].note == {"messages": GOES_ON["messages"]}

    attempt_id = service.calls[0]["attempt_id"]
    assert service.calls[0] == {
        "rollout_id": "r1",
        "group_id": "g7",
        "sample_index": 2,
        "attempt_id": attempt_id,
        "turn_id": f"{attempt_id}.0",
        "turn": 0,
        "is_last": False,
        "prompt": "user\nguess\nassistant\n",
        "completion": "3",
        "messages": [{"role": "user", "content": "guess"}],
        "data": {"secret": 4},
        "stop_reason": "stop",
        "policy_version": 6,
    }
    assert service.calls[1]["turn_id"] == f"{attempt_id}.1"
    assert (service.calls[1]["turn"], service.calls[1]["policy_version"]) == (1, 8)
    assert service.calls[1]["messages"] == [
        {"role": "user", "content": "guess"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "higher"},
    ]


async def test_what_travels_is_what_the_documentation_says(tokenizer):
    answers = [{**GOES_ON, "reward": None}, {**END, "turn_rewards": {"0": 1}, "details": {}}]
    service = Service(*answers)
    await play(tokenizer, service, [said("3"), said("4")])
    for call in service.calls:
        jsonschema.validate(call, {**CALL_SCHEMA, "additionalProperties": False})
        assert call.keys() == CALL_SCHEMA["properties"].keys()
    for answer in [*answers, {"action": "end"}]:
        jsonschema.validate(answer, ANSWER_SCHEMA)


async def test_without_a_reward_the_one_that_was_submitted_judges_the_last_turn(tokenizer):
    service = Service(GOES_ON, {"action": "end", "details": {"more": 1}})
    row = await play(tokenizer, service, [said("3"), said("4")])
    assert (row.reward, row.verdict) == (0.25, "wrong_answer")
    assert row.details == {"saw": "4", "more": 1}


async def test_a_service_that_fails_is_told_of_the_same_turn_again(tokenizer):
    service = Service(503, 500, GOES_ON, 429, END)
    await play(tokenizer, service, [said("3"), said("4")])
    assert service.calls[0] == service.calls[1] == service.calls[2]
    assert service.calls[3] == service.calls[4]
    assert len({call["turn_id"] for call in service.calls}) == 2


async def test_a_service_that_goes_on_failing_is_an_outage(tokenizer):
    service = Service(500, 500, 500)
    with pytest.raises(BackendError, match="answered 500"):
        await play(tokenizer, service, [said("3")], attempts=2)
    assert len(service.calls) == 2


async def test_a_sample_that_is_played_anew_is_another_play(tokenizer):
    service = Service(END, END)
    for _ in range(2):
        await play(tokenizer, service, [said("3")])
    assert service.calls[0]["attempt_id"] != service.calls[1]["attempt_id"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "action"),
        ([], "answer"),
        ({"action": "stop"}, "action|stop"),
        ({"action": "continue"}, "messages: Field required"),
        ({"action": "continue", "messages": []}, "at least 1 item"),
        ({**GOES_ON, "rewards": 1}, "rewards: Extra inputs"),
        ({**END, "reward": "high"}, "reward"),
        ({**END, "turn_rewards": {"7": 1}}, "a reward for turn 7; the sample has 1"),
        ({**END, "turn_rewards": {"-1": 1}}, "a reward for turn -1"),
        (
            {
                "action": "continue",
                "messages": [{"role": "user", "content": [{"type": "image_url"}]}],
            },
            "parts of type image_url",
        ),
    ],
    ids=[
        "empty",
        "list",
        "unknown",
        "silent",
        "no words",
        "extra",
        "text",
        "far turn",
        "no turn",
        "image",
    ],
)
async def test_an_answer_of_another_form_fails_the_rollout(tokenizer, answer, message):
    service = Service(answer)
    with pytest.raises(WorkflowError, match=message):
        await play(tokenizer, service, [said("3")])
    assert len(service.calls) == 1


async def test_the_last_turn_is_told_and_must_end(tokenizer):
    service = Service(GOES_ON, GOES_ON)
    with pytest.raises(WorkflowError, match="continue to turn 1, which had is_last"):
        await play(tokenizer, service, [said("3"), said("4")], max_turns=2)
    assert [call["is_last"] for call in service.calls] == [False, True]


async def test_a_turn_without_room_is_told_without_a_completion(tokenizer):
    first = said("3<|im_end|>")
    service = Service(GOES_ON, END)
    row = await play(tokenizer, service, [first], max_tokens=40)
    check_row(row, OPENING, first)
    assert (row.reward, row.stop_reason, row.turns[0].stop_reason) == (0.5, "length", "stop")
    last = service.calls[-1]
    assert (last["turn"], last["completion"], last["is_last"]) == (1, None, True)
    assert (last["stop_reason"], last["policy_version"]) == ("length", None)


async def test_a_text_goes_on_with_the_text_of_the_messages(tokenizer):
    first, second = said("3"), said("4")
    prompt = Prompt(group_id="g", text="guess:")
    row = await play(tokenizer, Service(GOES_ON, END), [first, second], prompt)
    check_row(row, "guess:", first, "higher", second)


async def test_a_url_that_the_config_does_not_allow_is_never_called(tokenizer):
    ref = WorkflowRef(name="callback", args={"url": "http://127.0.0.1:9/"})
    workflow = make_workflow(ref, tokenizer, SamplingConfig())
    context = RolloutContext(
        ScriptedPolicy([said("3")]), Judge(None), SharedServices(NoSandbox(), NoOutbound())
    )
    with pytest.raises(Forbidden):
        await workflow.run(Sample("r1", PROMPT, 0), context)


@pytest.mark.parametrize(
    "args", [{}, {"url": "ftp://x/"}, {"url": "http://x/", "turns": 2}], ids=str
)
def test_arguments_that_do_not_fit_are_refused(tokenizer, args):
    with pytest.raises(ConfigError):
        make_workflow(WorkflowRef(name="callback", args=args), tokenizer, SamplingConfig())
