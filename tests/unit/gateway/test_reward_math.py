"""The math verifier: what it takes for equal, and that no answer can hang it."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.components.shared_services import NoOutbound, NoSandbox, SharedServices
from gateway.rewards import math as math_reward
from gateway.rewards.base import Answer, make_reward
from gateway.rewards.final_answer import is_same
from gateway.rewards.scoring import Scorer
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.errors import ConfigError, DataError
from headway.contracts.types import RewardResult

pytest.importorskip("math_verify", reason="the extra `rewards` is not installed")
on_one_loop = pytest.mark.asyncio(loop_scope="module")

SOFT_LIMIT = {"timeout_s": 1.0}
BOMBS = {
    "tower": r"\boxed{9^{9^{9^{9}}}}",
    "factorial": r"\boxed{(10^{7})!}",
    "sum": r"\boxed{\sum_{n=1}^{10^{9}} \frac{1}{n^{3}}}",
    "set": r"\boxed{\{" + ",".join(f"x+{n}" for n in range(400)) + r"\}}",
    "braces": r"\boxed{" + "{" * 3000 + "}" * 3000 + "}",
    "fractions": r"\boxed{" + r"\frac{1}{1+" * 400 + "x" + "}" * 400 + "}",
    "unboxed": "$" + "9^{" * 60 + "9" + "}" * 60 + "$",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer():
    config = ExecutorConfig(reward_workers=1, reward_timeout_s=20.0)
    made = Scorer(config, SharedServices(NoSandbox(), NoOutbound()))
    await made.pool.start()
    yield made
    await made.aclose()


async def grade(scorer, completion, gold, **args) -> RewardResult:
    return await scorer.score(
        ComponentConfig(name="math", args=args), Answer("p", completion, {"answer": gold})
    )


@pytest.mark.parametrize(
    ("completion", "gold", "wanted"),
    [
        (r"\boxed{42}", "42", "accepted"),
        (r"\boxed{42.0}", "42", "accepted"),
        (r"\boxed{1,234}", "1234", "accepted"),
        (r"\boxed{43}", "42", "wrong_answer"),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", "accepted"),
        (r"\boxed{42}", r"the solution, so \boxed{42}", "accepted"),
        (r"\boxed{42}", "5 * 8 + 2\n#### 42", "accepted"),
        (r"\boxed{\frac{1}{2}}", "0.5", "accepted"),
        (r"\boxed{\frac{1}{2}}", "3", "wrong_answer"),
        (r"\boxed{90^\circ}", "90", "accepted"),
        (r"\boxed{5 \text{ cm}}", r"6 \text{ cm}", "wrong_answer"),
        ("so the answer is $x^{2}$.", "x^2", "accepted"),
        (r"so the answer is \(42\)", "42", "accepted"),
        ("  ", "42", "wrong_format"),
    ],
)
def test_text_and_numbers_settle_quickly(completion, gold, wanted):
    result = make_reward("math", {}).quick(Answer("p", completion, {"answer": gold}))
    assert result is not None
    assert (result.score, result.verdict) == (float(wanted == "accepted"), wanted)


@pytest.mark.parametrize(
    ("completion", "gold", "wanted"),
    [
        (r"\boxed{\frac{1}{3}}", "0.333333", "accepted"),
        (r"\boxed{5\%}", "5", "accepted"),
        (r"\boxed{0.05}", r"5\%", "accepted"),
        (r"\boxed{5\%}", "500", "wrong_answer"),
        ("the answer is $6$.", "5", "wrong_answer"),
        (r"\boxed{2x + 1}", "1 + 2x", "accepted"),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", "accepted"),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", "accepted"),
        (r"\boxed{x=5}", "5", "accepted"),
        ("so the answer is $x = 5$.", "5", "accepted"),
        (r"\boxed{x+1}", "x+2", "wrong_answer"),
        (r"\boxed{\frac}", "2", "wrong_answer"),
        ("I do not know.", "2", "wrong_answer"),
    ],
)
@on_one_loop
async def test_the_rest_is_compared_as_mathematics(scorer, completion, gold, wanted):
    result = await grade(scorer, completion, gold)
    assert (result.score, result.verdict) == (float(wanted == "accepted"), wanted)


ALIKE = (
    *("5", "+5", "-5", "5.0", "0", ".5", "0.5", "-0.5", "1,234", "1234", r"1{,}234", "x=5"),
    *("1/2", "-1/2", "10/2", r"\frac12", r"\frac{1}{2}", r"\dfrac{2}{4}", r"\frac{-1}{2}"),
    *(r"\frac{1}{3}", "0.333333", "0.3333", r"\frac{1}{0}", r"3\frac{1}{2}", r"\frac{7}{2}"),
    *(r"\$5", r"50\%", "50%", "50", r"5\%", r"\frac{1}{2}\%", r"120^\circ", r"120^{\circ}", "120"),
    *("10", r"10\text{ cm}", r"10 \text{ cm}", r"12\text{ cm}"),
    *("x^{2}", "x^2", "x^{23}", "x^23", "a_{1}", "a_1"),
)


def test_what_text_and_numbers_decide_sympy_decides_alike():
    from math_verify import parse, verify

    parsed = {text: parse(rf"\boxed{{{text}}}") for text in ALIKE}
    settled = {
        (found, gold): result
        for found, gold in itertools.product(ALIKE, ALIKE)
        if (result := is_same(found, gold)) is not None
    }
    assert len(settled) > 700
    other = [pair for pair in settled if verify(*map(parsed.get, pair[::-1])) != settled[pair]]
    assert other == []


@on_one_loop
async def test_strict_wants_a_box(scorer):
    result = await grade(scorer, "so the answer is $x = 5$.", "5", strict=True)
    assert (result.score, result.verdict) == (0.0, "wrong_format")


@pytest.mark.parametrize(
    "row", [{}, {"answer": ""}, {"answer": "#### "}], ids=["no", "empty", "cut"]
)
def test_a_row_without_an_answer_is_a_data_error(row):
    with pytest.raises(DataError, match="answer"):
        make_reward("math", {}).quick(Answer("p", r"\boxed{1}", row))


@pytest.mark.parametrize("bomb", BOMBS)
@on_one_loop
async def test_no_answer_hangs_it_and_the_next_one_is_right(scorer, bomb):
    result = await grade(scorer, BOMBS[bomb], "x+3", **SOFT_LIMIT)
    assert result.score == 0.0
    assert result.verdict in ("timeout", "wrong_answer", "memory")
    assert (await grade(scorer, r"\boxed{y + y}", "2y")).score == 1.0


@pytest.mark.extended
@on_one_loop
async def test_a_bomb_that_the_alarm_does_not_stop_is_killed():
    config = ExecutorConfig(reward_workers=1, reward_timeout_s=2.0, reward_attempts=20)
    scorer = Scorer(config, SharedServices(NoSandbox(), NoOutbound()))
    await scorer.pool.start()
    try:
        result = await grade(scorer, BOMBS["tower"], "3", timeout_s=60.0)
        assert (result.score, result.verdict) == (0.0, "timeout")
        assert (await grade(scorer, r"\boxed{y + y}", "2y")).score == 1.0
    finally:
        await scorer.aclose()


def test_without_math_verify_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(math_reward, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the extra 'rewards'"):
        make_reward("math", {})


def test_who_makes_the_reward_does_not_import_sympy():
    code = (
        "import sys; from gateway.rewards.base import Answer, make_reward\n"
        "reward = make_reward('math', {})\n"
        "assert reward.quick(Answer('p', r'\\boxed{x+1}', {'answer': '1+x'})) is None\n"
        "assert not {'sympy', 'math_verify', 'torch'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def math500_rows() -> list[dict]:
    folder = os.environ.get("HEADWAY_DATA_DIR")
    file = Path(folder or "") / "math500" / "test.jsonl"
    if folder is None or not file.is_file():
        pytest.skip("HEADWAY_DATA_DIR names no directory with math500/test.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@on_one_loop
async def test_every_solution_of_math500_agrees_with_its_answer(scorer, math500_rows):
    assert len(math500_rows) == 500
    part = ComponentConfig(name="math")
    answers = [Answer(row["problem"], row["solution"], row) for row in math500_rows]
    results = await asyncio.gather(*[scorer.score(part, answer) for answer in answers])
    assert [
        r["unique_id"] for r, s in zip(math500_rows, results, strict=True) if s.score != 1
    ] == []


@on_one_loop
async def test_sympy_agrees_with_every_answer_of_math500_outside_a_box(scorer, math500_rows):
    part = ComponentConfig(name="math")
    answers = [Answer("p", f"The answer is ${row['answer']}$, surely", row) for row in math500_rows]
    assert [make_reward("math", {}).quick(answer) for answer in answers] == [None] * 500
    results = await asyncio.gather(*[scorer.score(part, answer) for answer in answers])
    assert [r["answer"] for r, s in zip(math500_rows, results, strict=True) if s.score != 1] == []


def test_every_answer_of_math500_that_ends_its_text_is_settled_quickly(math500_rows):
    reward = make_reward("math", {})
    answers = [Answer("p", f"So it is ${row['answer']}$.", row) for row in math500_rows]
    assert {result and result.score for result in map(reward.quick, answers)} == {1.0}


@on_one_loop
async def test_no_answer_of_math500_is_the_answer_to_the_next_question(scorer, math500_rows):
    part = ComponentConfig(name="math")
    pairs = [
        (one["answer"], other["answer"])
        for one, other in itertools.pairwise(math500_rows[:101])
        if one["answer"] != other["answer"]
    ]
    results = await asyncio.gather(
        *[scorer.score(part, Answer("p", rf"\boxed{{{a}}}", {"answer": b})) for a, b in pairs]
    )
    equal = [pair for pair, result in zip(pairs, results, strict=True) if result.score]
    assert equal == [("5", "x=5")]
