"""Plain functions in the signatures of the field, registered as they are."""

import importlib.util
import pickle
from pathlib import Path

import pytest
import sample_rewards

from headway.contracts.errors import ConfigError, DataError
from headway.contracts.types import RewardResult
from headway.rollout.facilities import Facilities, NoOutbound, NoSandbox
from headway.rollout.parts import args_model
from headway.rollout.rewards.base import Answer, make_reward
from headway.rollout.rewards.functions import as_factory

ANSWER = Answer("2+2=", "4", {"answer": "4", "level": 1, "prompt": "taken"}, (1, 2), (3,))


def made(function, **args):
    return as_factory(function)(**args)


def test_our_own_signature():
    assert made(sample_rewards.plain_reward)(ANSWER) == 1.0
    assert made(sample_rewards.plain_reward, bonus=2.0)(ANSWER) == 3.0


def test_the_signature_of_areal_gets_the_row_as_keywords():
    assert made(sample_rewards.areal_reward)(ANSWER) == 1.0 + 1 + 1  # one token, `level`


def test_a_function_without_keywords_gets_only_what_it_names():
    assert made(sample_rewards.narrow_areal_reward)(ANSWER) is True


@pytest.mark.parametrize(
    "row",
    [{"reward_model": {"ground_truth": "4"}}, {"ground_truth": "4"}, {"answer": "4"}],
    ids=["reward_model", "ground_truth", "answer"],
)
def test_the_signature_of_verl_finds_the_ground_truth(row):
    answer = Answer("p", "4", {**row, "data_source": "gsm8k", "extra_info": {"split": "test"}})
    result = made(sample_rewards.compute_score)(answer)
    assert result == RewardResult(1.0, {"source": "gsm8k", "split": "test", "how": "strict"})
    assert made(sample_rewards.compute_score, method="loose")(answer).details["how"] == "loose"


def test_a_row_without_a_ground_truth_is_a_data_error():
    with pytest.raises(DataError, match=r"no reward_model.ground_truth.*it has \['level'\]"):
        made(sample_rewards.compute_score)(Answer("p", "4", {"level": 1}))


async def test_an_async_function_awaits_with_the_facilities():
    facilities = Facilities(NoSandbox(), NoOutbound())
    result = await made(sample_rewards.plain_async_reward).judge(ANSWER, facilities)
    assert result == RewardResult(0.5, {"sandbox": "NoSandbox"})
    assert await made(sample_rewards.compute_score_later).judge(ANSWER, facilities) is True


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (sample_rewards.plain_reward, ["bonus"]),
        (sample_rewards.compute_score, ["method"]),
        (sample_rewards.areal_reward, []),
        (sample_rewards.plain_async_reward, []),
    ],
    ids=["plain", "verl", "areal", "async"],
)
def test_only_what_no_answer_fills_is_an_argument(function, names):
    assert list(args_model(as_factory(function)).model_fields) == names


def test_classes_and_factories_stay_what_they_are():
    for target in (sample_rewards.Scores, sample_rewards.good):
        assert as_factory(target) is target
    assert as_factory(sample_rewards.good)() is sample_rewards.tells


def test_a_function_travels_by_name():
    factory = as_factory(sample_rewards.plain_reward)
    assert pickle.loads(pickle.dumps(factory))(bonus=1.0)(ANSWER) == 2.0


def test_a_signature_that_only_type_checkers_understand_is_no_obstacle():
    def reward(answer: "Missing", weight: "Missing" = 1.0):  # noqa: F821
        return weight

    assert made(reward, weight=0.5)(ANSWER) == 0.5


def test_unknown_arguments_are_refused():
    from headway.rollout.parts import build_part

    with pytest.raises(ConfigError, match="unknown key bonus"):
        build_part(as_factory(sample_rewards.areal_reward), "reward", "areal", {"bonus": 1})


def test_the_rewards_of_the_example_judge():
    file = Path(__file__).parents[3] / "examples" / "rewards" / "my_rewards.py"
    spec = importlib.util.spec_from_file_location("my_rewards", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    row = {"answer": "2+2\n#### 4", "ground_truth": "4", "keywords": ["4", "Five"]}
    answer = Answer("2+2=", "4", row, (1,), (2,))
    assert make_reward("brevity", {"per_token": 0.5})(answer) == -0.5
    assert make_reward("gsm8k_areal", {})(answer) == 1.0
    assert make_reward("my_compute_score", {})(answer) == RewardResult(1.0, {"length": 1})
    assert make_reward("keywords", {})(answer).score == 0.5
