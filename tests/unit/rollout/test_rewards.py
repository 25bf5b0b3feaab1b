import json
import os
from pathlib import Path

import pytest

from headway.contracts.errors import ConfigError, DataError
from headway.rollout.rewards.base import make_reward
from headway.rollout.rewards.exact import ExactMatch
from headway.rollout.rewards.gsm8k import GSM8K


@pytest.mark.parametrize(
    ("completion", "score"), [("42", 1.0), (" 42\n", 1.0), ("42.", 0.0), ("", 0.0), ("4 2", 0.0)]
)
def test_exact_compares_the_stripped_text(completion, score):
    assert ExactMatch()("p", completion, {"answer": " 42 "}) == score


@pytest.mark.parametrize(
    ("pattern", "completion", "score"),
    [
        (r"\d+", "first 7, then 42", 1.0),  # the last match
        (r"\d+", "first 42, then 7", 0.0),
        (r"answer: (\S+)", "answer: 7 answer: 42", 1.0),  # the group
        (r"answer: (\S+)", "42", 0.0),
    ],
)
def test_exact_takes_the_last_match_of_its_pattern(pattern, completion, score):
    assert make_reward("exact", {"pattern": pattern})("p", completion, {"answer": 42}) == score


def test_exact_without_the_field_is_a_data_error():
    with pytest.raises(DataError, match=r"no field 'target'; it has \['answer'\]"):
        ExactMatch("target")("p", "c", {"answer": 1})


def test_a_pattern_that_is_none_is_a_config_error():
    with pytest.raises(ConfigError, match="not a regular expression"):
        make_reward("exact", {"pattern": "("})


ROW = {"answer": "5 apples at $300 make <<5*300=1500>>1500.\n#### 1,500"}


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("#### 1500", 1.0),
        ("#### 1,500", 1.0),
        ("####1500.00", 1.0),
        ("#### $1,500", 1.0),
        ("so \\boxed{1500}", 1.0),
        ("\\boxed{ 1,500 } dollars", 1.0),
        ("It is 1500.", 1.0),
        ("It is 1500, of course", 1.0),
        ("7 \\boxed{3} #### 1500 and 9 more", 1.0),  # the mark wins over the box and the text
        ("\\boxed{1500} costs 3 dollars", 1.0),
        ("#### 3 no, #### 1500", 1.0),  # the last mark
        ("#### 1500 no, #### 3", 0.0),
        ("1500 then 3", 0.0),
        ("-1500", 0.0),
        ("#### -1500", 0.0),
        ("15000", 0.0),
        ("fifteen hundred", 0.0),
        ("", 0.0),
        ("####", 0.0),
    ],
)
def test_gsm8k_compares_numbers(completion, score):
    assert GSM8K()("p", completion, ROW) == score


@pytest.mark.parametrize(
    ("completion", "score"), [("It is 1500", 0.0), ("#### 1500", 1.0), ("\\boxed{1500}", 1.0)]
)
def test_strict_gsm8k_wants_a_mark(completion, score):
    assert make_reward("gsm8k", {"strict": True})("p", completion, ROW) == score


def test_gsm8k_without_a_reference_is_a_data_error():
    for row in ({}, {"answer": "no mark"}, {"answer": None}):
        with pytest.raises(DataError, match="no '#### number'"):
            GSM8K()("p", "1", row)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("piece", ["1,", "####", "$", "1.", "\\boxed{", "-", " "])
def test_gsm8k_stays_fast_on_long_nonsense(piece):
    assert GSM8K()("p", piece * 200_000, ROW) == 0.0


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
        assert [verify(row["question"], text, row) for text in right] == [1.0] * 4, row
        wrong = [f"#### {value + 1}", f"#### {-value - 1}", f"{value}1", row["question"][:0]]
        assert [verify(row["question"], text, row) for text in wrong] == [0.0] * 4, row
