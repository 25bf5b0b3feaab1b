import json
import os
from pathlib import Path

import pytest

from gateway.rewards.base import REWARDS, Answer, make_reward, reward_schema
from gateway.rewards.exact import ExactMatch
from gateway.rewards.final_answer import is_same, last_box, last_formula, plain, to_number
from gateway.rewards.gsm8k import GSM8K
from headway.contracts.errors import ConfigError, DataError


def judge(reward, completion, data, prompt="p"):
    """Score and verdict; the quick way, if it settles anything, says the same."""
    answer = Answer(prompt, completion, data)
    quick = reward.quick(answer)
    result = reward(answer)
    assert quick in (None, result)
    return result.score, result.verdict


RIGHT, WRONG, FORMLESS = (1.0, "accepted"), (0.0, "wrong_answer"), (0.0, "wrong_format")


@pytest.mark.parametrize(
    ("completion", "wanted"),
    [("42", RIGHT), (" 42\n", RIGHT), ("42.", WRONG), ("", WRONG), ("4 2", WRONG)],
)
def test_exact_compares_the_stripped_text(completion, wanted):
    assert judge(ExactMatch(), completion, {"answer": " 42 "}) == wanted


@pytest.mark.parametrize(
    ("pattern", "completion", "wanted"),
    [
        (r"\d+", "first 7, then 42", RIGHT),  # the last match
        (r"\d+", "first 42, then 7", WRONG),
        (r"answer: (\S+)", "answer: 7 answer: 42", RIGHT),  # the group
        (r"answer: (\S+)", "42", FORMLESS),
        (r"answer: (\S+)?", "answer: ", FORMLESS),
    ],
)
def test_exact_takes_the_last_match_of_its_pattern(pattern, completion, wanted):
    assert judge(make_reward("exact", {"pattern": pattern}), completion, {"answer": 42}) == wanted


def test_a_pattern_from_outside_is_never_searched_for_on_the_event_loop():
    reward = ExactMatch(pattern="(a+)+$")
    assert reward.quick(Answer("p", "a" * 1000 + "b", {"answer": "a"})) is None


def test_exact_without_the_field_is_a_data_error():
    with pytest.raises(DataError, match=r"no field 'target'; it has \['answer'\]"):
        judge(ExactMatch("target"), "c", {"answer": 1})


def test_a_pattern_that_is_none_is_a_config_error():
    with pytest.raises(ConfigError, match="not a regular expression"):
        make_reward("exact", {"pattern": "("}).check()


ROW = {"answer": "5 apples at $300 make <<5*300=1500>>1500.\n#### 1,500"}


@pytest.mark.parametrize(
    ("completion", "wanted"),
    [
        ("#### 1500", RIGHT),
        ("#### 1,500", RIGHT),
        ("####1500.00", RIGHT),
        ("#### $1,500", RIGHT),
        ("so \\boxed{1500}", RIGHT),
        ("\\boxed{ 1,500 } dollars", RIGHT),
        ("\\boxed{1{,}500}", RIGHT),
        ("\\boxed{1\\!,\\!500}", RIGHT),
        ("\\boxed{\\$1500}", RIGHT),
        ("\\boxed{\\text{She pays } \\$1500}", RIGHT),
        ("\\boxed{5*300 = 1500}", RIGHT),
        ("It is 1500.", RIGHT),
        ("It is 1500, of course", RIGHT),
        ("7 \\boxed{3} #### 1500 and 9 more", RIGHT),  # the mark wins over the box and the text
        ("\\boxed{1500} costs 3 dollars", RIGHT),
        ("\\boxed{3} or \\boxed{1500}", RIGHT),  # the last box
        ("#### 3 no, #### 1500", RIGHT),  # the last mark
        ("#### 1500 no, #### 3", WRONG),
        ("1500 then 3", WRONG),
        ("-1500", WRONG),
        ("#### -1500", WRONG),
        ("15000", WRONG),
        ("\\boxed{?} 1500", FORMLESS),
        ("fifteen hundred", FORMLESS),
        ("", FORMLESS),
        ("####", FORMLESS),
    ],
)
def test_gsm8k_compares_numbers(completion, wanted):
    assert judge(GSM8K(), completion, ROW) == wanted


@pytest.mark.parametrize(
    ("completion", "wanted"),
    [("It is 1500", FORMLESS), ("#### 1500", RIGHT), ("\\boxed{1500}", RIGHT)],
)
def test_strict_gsm8k_wants_a_mark(completion, wanted):
    assert judge(make_reward("gsm8k", {"strict": True}), completion, ROW) == wanted


def test_gsm8k_settles_everything_quickly():
    assert GSM8K().quick(Answer("p", "no idea", ROW)) is not None


def test_gsm8k_without_a_reference_is_a_data_error():
    for row in ({}, {"answer": "no mark"}, {"answer": None}):
        with pytest.raises(DataError, match="no '#### number'"):
            judge(GSM8K(), "1", row)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("piece", ["1,", "####", "$", "1.", "\\boxed{", "-", " ", "{", "\\", "}"])
def test_gsm8k_stays_fast_on_long_nonsense(piece):
    assert judge(GSM8K(), piece * 200_000, ROW)[0] == 0.0


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "piece",
    ["$", "a$", "$a", "\\(", "\\(a\\)b", "\\[", "\\", " ", "^{a}", "/1", "\\frac", "%", "}"],
)
def test_formulas_are_looked_for_in_linear_time(piece):
    text = piece * 50_000
    last_formula(text)
    assert is_same(f"4{text}", "5") is not True
    assert is_same(f"{text}4", f"5{text}") is not True


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("\\boxed{5}", "5"),
        ("\\boxed {5}", "5"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} \\boxed{2}", "2"),
        ("\\boxed{\\boxed{2}}", "\\boxed{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("} { \\boxed{5}", "5"),
        ("\\boxed{5} \\boxed{6", "5"),
        ("\\boxed{5", None),
        ("\\boxed", None),
        ("", None),
    ],
)
def test_the_last_closed_box_is_found(text, box):
    assert last_box(text) == box


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("so $5$.", "5"),
        ("so $5$ or $6$.\n", "6"),
        ("so \\(x + 1\\)", "x + 1"),
        ("\\[x\\]", "x"),
        ("$x$ it is", None),
        ("$$x$$", None),
        ("it costs $5", None),
        ("it costs \\$5$", None),
        ("it costs $\\$5$", "\\$5"),
        ("$1\n2$", None),
        ("$", None),
        ("", None),
        ("\\(" * 12_000 + r"y\)", "y"),
        (r"\(" + "x" * 1200 + r"\)", None),
    ],
)
def test_the_formula_that_ends_a_text_is_found(text, formula):
    assert last_formula(text) == formula


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1500", 1500),
        ("1,500.00", 1500),
        ("$1{,}500$", 1500),
        ("1\\,500", 1500),
        ("-0.5", -0.5),
        ("+.5", 0.5),
        ("7.", 7),
        ("7..", 7),
        ("3/4", 0.75),
        ("\\frac12", 0.5),
        ("-\\dfrac{3}{-4}", None),
        ("\\frac{-3}{4}", -0.75),
        ("1/0", None),
        ("1,50", None),
        ("1,500,0", None),
        ("5%", None),
        ("1e9", None),
        ("x=5", None),
        ("1 2", None),
        ("9" * 500, None),
        ("", None),
    ],
)
def test_plain_numbers_are_read(text, number):
    assert to_number(text) == number


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\dfrac{\\pi}{2})"),
        ("2 x + 1", "2 x+1"),
        ("\\tfrac12.", "\\frac12"),
        ("\\frac 1 2", "\\frac{1}{2}"),
        ("x^{2} + a_{n}", "x^2+a_n"),
    ],
)
def test_texts_that_look_different_read_the_same(first, second):
    assert plain(first) == plain(second)


@pytest.mark.parametrize(
    ("first", "second"), [("1 2", "12"), ("\\cos x", "\\cosx"), ("a", "A"), ("2^{2}3", "2^23")]
)
def test_texts_that_read_differently_stay_different(first, second):
    assert plain(first) != plain(second)


GOOD = "<think>two and two</think>\n<answer> 4 </answer>"


@pytest.mark.parametrize(
    "completion",
    [
        GOOD,
        f"\n {GOOD}\n",
        "<think></think><answer></answer>",
        "<think>a < b and </b></think><answer>4</answer>",
    ],
)
def test_format_keeps_its_form(completion):
    assert judge(make_reward("format", {}), completion, {}) == (1.0, "accepted")


@pytest.mark.parametrize(
    "completion",
    [
        "4",
        "",
        f"Well: {GOOD}",
        f"{GOOD} or 5",
        "<answer>4</answer><think>so</think>",
        "<think>so<answer>4</answer></think>",
        "<think>so</think><answer>4</answer><answer>5</answer>",
        "<think>so</think> then <answer>4</answer>",
        "<think>so</think><answer>4",
        "</think><think><answer>4</answer>",
    ],
)
def test_format_refuses_any_other_form(completion):
    assert judge(make_reward("format", {}), completion, {}) == FORMLESS


def test_a_prompt_that_opens_the_thinking_counts():
    reward = make_reward("format", {})
    rest = GOOD.removeprefix("<think>")
    assert judge(reward, rest, {}, prompt="2+2? <think>\n")[0] == 1.0
    assert judge(reward, GOOD, {}, prompt="2+2? <think>\n")[0] == 1.0
    assert judge(reward, rest, {}, prompt="2+2?")[0] == 0.0


@pytest.mark.parametrize(
    ("answer", "wanted"), [("4", (1.1, "accepted")), ("5", (0.1, "wrong_answer"))]
)
def test_format_adds_what_the_answer_earns(answer, wanted):
    reward = make_reward("format", {"weight": 0.1, "inner": {"name": "exact"}})
    completion = f"<think>4</think><answer>{answer}</answer>"
    assert judge(reward, completion, {"answer": "4"}) == wanted
    assert judge(reward, "4", {"answer": "4"}) == FORMLESS


def test_format_takes_other_tags():
    reward = make_reward("format", {"tags": ["plan", "code", "answer"]})
    assert judge(reward, "<plan>a</plan><code>b</code><answer>c</answer>", {})[0] == 1.0
    assert judge(reward, GOOD, {}) == FORMLESS


def test_format_has_what_its_inner_reward_declares():
    reward = make_reward("format", {"inner": {"name": "math"}})
    assert (reward.hang_verdict, reward.preload) == ("timeout", make_reward("math", {}).preload)


async def test_format_awaits_a_reward_that_awaits_others():
    inner = {"name": "reward_model", "args": {"url": "http://model/"}}
    reward = make_reward("format", {"inner": inner, "inner_weight": 2.0})

    class Outbound:
        async def post(self, url, body, timeout_s):
            assert body["completion"] == "4"
            return {"score": 0.25}

    class SharedServices:
        outbound = Outbound()

    result = await reward.score(Answer("p", GOOD, {}), SharedServices())
    assert (result.score, result.details) == (1.5, {"format": 1.0, "answer": 0.25})
    assert (await reward.score(Answer("p", "4", {}), SharedServices())).verdict == "wrong_format"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tags": ["a", "a"]}, "names one twice"),
        ({"tags": []}, "tags"),
        ({"tags": ["a>"]}, "tags"),
        ({"weight": float("nan")}, "weight"),
        ({"inner": {"name": "format"}}, "name all tags in one"),
        ({"inner": {"name": "exakt"}}, "did you mean 'exact'"),
        ({"inner": {"name": "exact", "args": {"key": 1}}}, "unknown key key"),
    ],
    ids=["twice", "none", "bracket", "nan", "nested", "unknown", "args"],
)
def test_format_refuses_what_it_cannot_check(args, message):
    with pytest.raises(ConfigError, match=message):
        make_reward("format", args)


@pytest.mark.parametrize("name", sorted(REWARDS._targets))
def test_every_reward_tells_its_arguments(name):
    schema = reward_schema(name)
    assert schema["type"] == "object"
    json.dumps(schema, allow_nan=False)


def test_a_schema_tells_bounds_defaults_and_meaning():
    schema = reward_schema("gsm8k")
    assert schema["additionalProperties"] is False
    assert schema["properties"]["strict"]["default"] is False
    assert schema["properties"]["answer_key"]["description"].startswith("Field of the row")


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("gsm8k", {"strict": "perhaps"}, "reward 'gsm8k': strict"),
        ("gsm8k", {"strikt": True}, "unknown key strikt; did you mean 'strict'"),
        ("math", {"timeout_s": 0}, "timeout_s"),
        ("reward_model", {}, "url: required, and not set"),
        ("reward_model", {"url": "file:///etc/passwd"}, "url"),
    ],
    ids=["type", "name", "bound", "missing", "scheme"],
)
def test_arguments_are_checked_before_anything_runs(name, args, message):
    with pytest.raises(ConfigError, match=message):
        make_reward(name, args)


@pytest.fixture(scope="module")
def gsm8k_rows() -> list[dict]:
    folder = os.environ.get("HEADWAY_DATA_DIR")
    file = Path(folder or "") / "gsm8k" / "test.jsonl"
    if folder is None or not file.is_file():
        pytest.skip("HEADWAY_DATA_DIR names no directory with gsm8k/test.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_reference_answer_of_gsm8k_is_right_and_every_other_number_wrong(gsm8k_rows):
    assert len(gsm8k_rows) == 1319
    verify = GSM8K()
    for row in gsm8k_rows:
        number = row["answer"].rpartition("####")[2].strip()
        value = int(number.replace(",", ""))
        right = [row["answer"], f"The answer is {number}.", f"\\boxed{{{value}}}", f"= ${value:,}"]
        assert {judge(verify, text, row) for text in right} == {RIGHT}, row
        wrong = [f"#### {value + 1}", f"#### {-value - 1}", f"{value}1"]
        assert {judge(verify, text, row) for text in wrong} == {WRONG}, row
