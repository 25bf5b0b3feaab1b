from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from gateway.fleet.resume import join, rest_of
from gateway.trajectories.sample import Sample
from gateway.workflows.base import RolloutContext, make_workflow
from headway.contracts.config.base import WorkflowRef
from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.errors import BackendError, ConfigError, DataError, RequestTooLong
from headway.contracts.types import LLMRequest, Prompt, RewardResult
from inference_server.backends.base import HeldVersion
from inference_server.backends.fake import FakeBackend
from tests.unit.gateway.games import (
    NOTHING,
    Judge,
    ScriptedPolicy,
    byte_tokenizer,
    chat_prompt,
    check_row,
    ids_of,
    said,
)

OPENING = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
BRIDGE = "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
PROMPT = chat_prompt("2+2?", data={"answer": 4})


@pytest.fixture
def tokenizer(tmp_path):
    return byte_tokenizer(tmp_path / "bytes")


def by_number(text: str) -> RewardResult:
    return RewardResult(float(text == "4"), {"saw": text}, "accepted" if text == "4" else "scored")


async def play(tokenizer, replies, args=None, decide=by_number, prompt=PROMPT, index=0, **options):
    policy = ScriptedPolicy(replies, options.pop("max_context", None))
    judge = Judge(decide)
    ref = WorkflowRef(name="multi_turn", args={"feedback": "No.", **(args or {})})
    workflow = make_workflow(ref, tokenizer, SamplingConfig(**options))
    (row,) = await workflow.run(Sample("r1", prompt, index), RolloutContext(policy, judge, NOTHING))
    return row, policy, judge


async def test_a_wrong_answer_is_told_and_tried_again(tokenizer):
    first, second = said("5<|im_end|>", 3, is_swapped=True), said("4<|im_end|>", 6)
    row, policy, judge = await play(tokenizer, [first, second], {"discount": 0.5, "max_turns": 5})
    check_row(row, OPENING, first, BRIDGE, second)
    assert row.versions[row.loss_mask].tolist() == [3, 4, 6, 6]
    assert (row.oldest_version, row.stop_reason, row.verdict) == (3, "stop", "accepted")
    assert (row.reward, row.details) == (0.5, {"saw": "4", "turns": 2, "score": 1.0})
    assert [(turn.reward, turn.note) for turn in row.turns] == [
        (0.0, {"verdict": "scored", "feedback": "No."}),
        (1.0, {"verdict": "accepted"}),
    ]
    assert [request.rid for request in policy.requests] == ["r1.0", "r1.0.1"]
    assert policy.requests[1].input_ids == tuple(row.input_ids[:-2].tolist())
    assert [(answer.prompt, answer.completion) for answer in judge.answers] == [
        ("user\n2+2?\nassistant\n", "5"),
        ("user\n2+2?\nassistant\n", "4"),
    ]
    assert judge.answers[1].completion_ids == list(second.tokens)
    assert judge.answers[1].messages == [{"role": "user", "content": "2+2?"}]


async def test_an_accepted_answer_ends_it(tokenizer):
    reply = said("4<|im_end|>")
    row, policy, _ = await play(tokenizer, [reply], {"max_turns": 5})
    check_row(row, OPENING, reply)
    assert (row.reward, len(policy.requests)) == (1.0, 1)


async def test_the_last_wrong_answer_is_what_counts(tokenizer):
    replies = [said("5<|im_end|>"), said("6<|im_end|>")]
    row, _, _ = await play(tokenizer, replies, decide=lambda text: RewardResult(int(text) / 10))
    assert (row.reward, row.verdict) == (0.6, "scored")


@pytest.mark.parametrize(("score", "reward"), [(0.8, 0.2), (-0.8, -0.8), (0.0, 0.0)])
async def test_further_turns_cost_what_is_gained_and_ease_no_penalty(tokenizer, score, reward):
    replies = [said("5<|im_end|>")] * 3
    args = {"discount": 0.5, "max_turns": 3}
    row, _, _ = await play(tokenizer, replies, args, lambda text: RewardResult(score))
    assert row.reward == pytest.approx(reward)


async def test_a_score_may_be_good_enough(tokenizer):
    args = {"accept_score": 0.5, "max_turns": 3}
    row, _, _ = await play(tokenizer, [said("5")], args, lambda text: RewardResult(0.5))
    assert len(row.turns) == 1


async def test_a_turn_cut_at_its_limit_is_closed_and_goes_on(tokenizer):
    cut, second = said("55"), said("4<|im_end|>")
    row, _, _ = await play(tokenizer, [said("5555"), second], max_new_tokens=2)
    check_row(row, OPENING, cut, "<|im_end|>" + BRIDGE, second)
    assert [turn.stop_reason for turn in row.turns] == ["length", "stop"]


async def test_the_row_ends_where_no_turn_has_room(tokenizer):
    first = said("5<|im_end|>")
    full = await play(tokenizer, [first, said("4")])
    for room in (0, 1):
        max_tokens = full[0].num_tokens - 1 + room
        row, policy, _ = await play(
            tokenizer, [first, said("4")], {"max_tokens": max_tokens}, min_new_tokens=1
        )
        if room:
            check_row(row, OPENING, first, BRIDGE, said("4"))
            assert policy.requests[1].gconfig.max_new_tokens == 1
        else:
            check_row(row, OPENING, first)
            assert (row.stop_reason, row.turns[0].stop_reason) == ("length", "stop")


async def test_the_row_ends_where_the_context_of_the_server_does(tokenizer):
    first = said("5<|im_end|>")
    options = {"max_context": 40, "max_new_tokens": 8}
    row, policy, _ = await play(tokenizer, [first, said("4")], **options)
    check_row(row, OPENING, first)
    assert (row.stop_reason, len(policy.requests)) == ("length", 1)


@pytest.mark.parametrize("options", [{"max_context": 8}, {"args": {"max_tokens": 8}}], ids=str)
async def test_a_prompt_that_leaves_no_room_is_an_error(tokenizer, options):
    with pytest.raises(RequestTooLong, match="8"):
        await play(tokenizer, [said("4")], **options)


async def test_turns_of_seeded_siblings_have_seeds_of_their_own_each_time_the_same(tokenizer):
    async def seeds() -> list[int]:
        plays = [
            await play(
                tokenizer, [said("5<|im_end|>")] * 3, {"max_turns": 3}, seed=100, index=index
            )
            for index in range(4)
        ]
        return [request.gconfig.seed for _, policy, _ in plays for request in policy.requests]

    first = await seeds()
    assert (len(set(first)), first[0]) == (12, 100)
    assert await seeds() == first


async def test_text_goes_on_with_text(tokenizer):
    first, second = said("5\n"), said("4\n")
    prompt = Prompt(group_id="g", text="2+2=")
    decide = lambda text: by_number(text.strip())  # noqa: E731 - a variation of the judge
    row, _, _ = await play(tokenizer, [first, second], prompt=prompt, decide=decide)
    check_row(row, "2+2=", first, "No.", second)


async def test_token_ids_are_no_prompt_for_several_turns(tokenizer):
    with pytest.raises(DataError, match="token ids"):
        await play(tokenizer, [], prompt=Prompt(group_id="g", input_ids=(1,)))


async def test_an_outage_in_a_later_turn_is_no_trajectory(tokenizer):
    async def generate(req):
        if req.rid.endswith(".1"):
            raise BackendError("gone")
        return await policy(req)

    policy = ScriptedPolicy([said("5<|im_end|>")])
    workflow = make_workflow(WorkflowRef(name="multi_turn"), tokenizer, SamplingConfig())
    with pytest.raises(BackendError, match="gone"):
        await workflow.run(
            Sample("r1", PROMPT, 0), RolloutContext(generate, Judge(by_number), NOTHING)
        )


def test_images_are_refused_by_name():
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ValueError, match=r"parts of type image_url, text.*without images"):
        Prompt.model_validate({"group_id": "g", "messages": [{"role": "user", "content": parts}]})


@pytest.mark.parametrize("args", [{"max_turns": 0}, {"discount": 2}, {"turns": 1}], ids=str)
def test_arguments_out_of_bounds_are_refused(tokenizer, args):
    with pytest.raises(ConfigError):
        make_workflow(WorkflowRef(name="multi_turn", args=args), tokenizer, SamplingConfig())


async def test_versions_that_change_between_and_within_turns_are_those_of_the_backend(tokenizer):
    """The fake backend's tokens depend on the version, so a wrong version would show in them."""
    backend = FakeBackend(FakeBackendConfig(vocab_size=258), ModelConfig(path="none"), 3)
    requests, replies = [], []

    async def generate(req):
        requests.append(req)
        half = LLMRequest.model_validate(
            {**req.model_dump(), "gconfig": {**req.gconfig.model_dump(), "max_new_tokens": 4}}
        )
        first = await backend.generate(half)
        await publish(backend.version + 1)
        replies.append(join(first, await backend.generate(rest_of(req, first))))
        return replies[-1]

    async def publish(version: int) -> None:
        await backend.swap(HeldVersion(Numbered(version)))

    ref = WorkflowRef(name="multi_turn", args={"max_turns": 3, "feedback": "No."})
    workflow = make_workflow(ref, tokenizer, SamplingConfig(max_new_tokens=6))
    context = RolloutContext(generate, Judge(lambda text: RewardResult(0.0)), NOTHING)
    (row,) = await workflow.run(Sample("r1", PROMPT, 0), context)

    assert row.versions[row.loss_mask].tolist() == [
        version for start in (3, 4, 5) for version in [start] * 4 + [start + 1] * 2
    ]
    for turn, request, reply in zip(row.turns, requests, replies, strict=True):
        assert row.input_ids[: turn.start].tolist() == list(request.input_ids)
        assert row.input_ids[turn.start : turn.end].tolist() == reply.output_tokens
        assert turn.stop_reason == "length"
    shown = np.array(ids_of("<|im_end|>" + BRIDGE), np.int32)
    for turn, following in pairwise(row.turns):
        np.testing.assert_array_equal(row.input_ids[turn.end : following.start], shown)
    assert (row.logprobs[row.loss_mask] == -1.0).all()
    assert (row.logprobs[~row.loss_mask] == 0.0).all()


@dataclass
class Numbered:
    """Weights of which only the version counts."""

    version: int
