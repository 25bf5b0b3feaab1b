"""The tree of a session's histories: exact tokens, forks, and what each branch trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.sessions.chat import Message, TurnRequest
from gateway.sessions.history import HistoryTree
from gateway.trajectories.sample import Sample
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import LLMResponse, Prompt, RewardResult, Trajectory
from tests.unit.gateway.games import CHATML, byte_tokenizer, check_row, ids_of, logprob_of, said

SAMPLE = Sample("r", Prompt(group_id="g", text=""), 3)
OPEN = "<|im_start|>assistant\n"
TOOLS = [{"type": "function", "function": {"name": "guess"}}]
# Tells the newest user message apart from earlier ones.
REWRITES = """{%- for message in messages %}
{%- if loop.last and message.role == 'user' %}[NEW]{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def shown(*contents: str) -> str:
    return "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents) + OPEN


class Play:
    """A client that keeps what it was told."""

    def __init__(self, folder: Path, template: str = CHATML) -> None:
        self.history = HistoryTree(byte_tokenizer(folder, template))

    def turn(
        self, messages: list[Message], answer: str, version: int = 0, **fields: Any
    ) -> list[Message]:
        """What the client sends next, but for what it adds."""
        place = self.history.place(TurnRequest(messages, SamplingConfig(), **fields))
        tokens = ids_of(answer)
        told = {"role": "assistant", "content": answer.removesuffix("<|im_end|>")}
        response = LLMResponse(
            rid="r",
            output_tokens=tokens,
            output_logprobs=[logprob_of(token) for token in tokens],
            version_runs=[(version, 0, len(tokens))],
            stop_reason="stop",
            latency_s=0.0,
            ttft_s=0.0,
        )
        self.history.add(place, told, response)
        return [*messages, told]

    def rows(self, **rewards: float) -> list[Trajectory]:
        turns = {int(name.removeprefix("turn_")): value for name, value in rewards.items()}
        return self.history.trajectories(SAMPLE, RewardResult(0.5), turns)


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path / "tokenizer")


def test_a_conversation_is_one_row(play: Play):
    first, second = said("b<|im_end|>", 1), said("d<|im_end|>", 2)
    told = play.turn([user("a")], "b<|im_end|>", 1)
    play.turn([*told, user("c")], "d<|im_end|>", 2)
    (row,) = play.rows(turn_1=2.0)
    check_row(row, shown("a"), first, "\n" + shown("c"), second)
    assert [turn.reward for turn in row.turns] == [None, 2.0]
    assert row.turns[1].note == {
        "number": 1,
        "messages": [user("c"), {"role": "assistant", "content": "d"}],
    }
    assert (row.trajectory_id, row.reward) == ("r/3", 0.5)


def test_a_turn_that_did_not_close_itself_is_closed_by_the_bridge(play: Play):
    told = play.turn([user("a")], "b")
    play.turn([*told, user("c")], "d")
    (row,) = play.rows()
    check_row(row, shown("a"), said("b"), "<|im_end|>\n" + shown("c"), said("d"))


def test_a_fork_shares_its_prefix_and_trains_on_it_once(play: Play):
    told = play.turn([user("a")], "b<|im_end|>")
    left = play.turn([*told, user("left")], "l<|im_end|>")
    play.turn([*told, user("right")], "r<|im_end|>")
    play.turn([*left, user("more")], "m<|im_end|>")
    first, second = play.rows()
    b, left_turn, right, more = (said(f"{text}<|im_end|>") for text in "blrm")
    check_row(first, shown("a"), b, "\n" + shown("left"), left_turn, "\n" + shown("more"), more)
    check_row(second, shown("a") + "b<|im_end|>\n" + shown("right"), right)
    assert (first.branch, second.branch) == (0, 1)
    assert [turn.note["number"] for turn in second.turns] == [2]


def test_an_edited_answer_forks_behind_the_last_turn_that_is_the_same(play: Play):
    told = play.turn([user("a")], "b<|im_end|>")
    later = play.turn([*told, user("c")], "d<|im_end|>")
    edited = [*later[:-1], {"role": "assistant", "content": "D"}, user("e")]
    play.turn(edited, "f<|im_end|>")
    _, second = play.rows()
    bridge = f"b<|im_end|>\n{shown('c')}D<|im_end|>\n"
    check_row(second, shown("a") + bridge + shown("e"), said("f<|im_end|>"))


def test_an_edited_beginning_is_a_row_without_anything_shared(play: Play):
    told = play.turn([user("a")], "b<|im_end|>")
    play.turn([user("A"), *told[1:], user("c")], "d<|im_end|>")
    first, second = play.rows()
    check_row(first, shown("a"), said("b<|im_end|>"))
    head = "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    check_row(second, head + shown("c"), said("d<|im_end|>"))


def test_other_tools_begin_another_history(play: Play):
    told = play.turn([user("a")], "b<|im_end|>")
    play.turn([*told, user("c")], "d<|im_end|>", tools=TOOLS)
    first, second = play.rows()
    check_row(first, shown("a"), said("b<|im_end|>"))
    head = '<|im_start|>system\n{"type": "function", "function": {"name": "guess"}}\n<|im_end|>\n'
    again = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    check_row(second, head + again + shown("c"), said("d<|im_end|>"))


def test_equal_answers_of_parallel_conversations_are_each_gone_on_from(play: Play):
    one, other = (play.turn([user("a")], "b<|im_end|>") for _ in range(2))
    play.turn([*one, user("c")], "d<|im_end|>")
    play.turn([*other, user("c")], "d<|im_end|>")
    rows = play.rows()
    assert [[turn.note["number"] for turn in row.turns] for row in rows] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("content", [None, ""], ids=["null", "empty"])
def test_null_and_empty_content_are_the_same(play: Play, content: str | None):
    play.turn([user("a")], "<|im_end|>")
    play.turn([user("a"), {"role": "assistant", "content": content}, user("c")], "d<|im_end|>")
    (row,) = play.rows()
    assert len(row.turns) == 2


def test_a_template_that_rewrites_gives_each_turn_a_row_of_what_it_saw(tmp_path: Path):
    play = Play(tmp_path / "tokenizer", REWRITES)
    told = play.turn([user("a")], "b<|im_end|>")
    play.turn([*told, user("c")], "d<|im_end|>")
    first, second = play.rows()
    check_row(first, f"[NEW]{shown('a')}", said("b<|im_end|>"))
    head = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    check_row(second, f"{head}[NEW]{shown('c')}", said("d<|im_end|>"))
