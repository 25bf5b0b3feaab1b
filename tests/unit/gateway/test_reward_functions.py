"""Plain functions in the signatures of the field, registered as they are."""

import importlib.util
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gateway.components.arguments import args_model
from gateway.components.shared_services import NoOutbound, NoSandbox, SharedServices
from gateway.rewards.base import REWARDS, Answer, make_reward, register_reward
from gateway.rewards.functions import as_factory, build_reward
from headway.contracts.errors import ConfigError, DataError, RewardError
from headway.contracts.types import RewardResult
from tests.unit.gateway import sample_rewards

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


async def test_an_async_function_awaits_with_the_services():
    services = SharedServices(NoSandbox(), NoOutbound())
    result = await made(sample_rewards.plain_async_reward).score(ANSWER, services)
    assert result == RewardResult(0.5, {"sandbox": "NoSandbox"})
    assert await made(sample_rewards.compute_score_later).score(ANSWER, services) is True
    assert await made(sample_rewards.trl_reward_later).score(ANSWER, services) == 0.25


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (sample_rewards.plain_reward, ["bonus"]),
        (sample_rewards.compute_score, ["method"]),
        (sample_rewards.areal_reward, []),
        (sample_rewards.plain_async_reward, []),
        (sample_rewards.trl_reward, []),
    ],
    ids=["plain", "verl", "areal", "async", "trl"],
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
    for function in (sample_rewards.areal_reward, sample_rewards.trl_reward):
        with pytest.raises(ConfigError, match="reward 'name': unknown key bonus"):
            build_reward(as_factory(function), "name", {"bonus": 1})


def test_the_signature_of_trl_gets_lists_of_one():
    answer = Answer("2+2=", "4", {"level": 7, "answer": "4", "prompt": "left out"}, (1,), (3, 4))
    assert made(sample_rewards.trl_reward)(answer) == 4 * 1000 + 1 * 100 + 7 * 10 + 2


def test_the_signature_of_trl_gets_messages_where_the_prompt_is_a_chat():
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    answer = Answer("<s>Add.<u>2+2=", "4", {"answer": "4"}, messages=chat)
    assert made(sample_rewards.trl_chat_reward)(answer) == 1.0


@pytest.mark.parametrize("score", [0.5, True, np.float32(0.5)], ids=["float", "bool", "numpy"])
def test_the_one_number_of_trls_list_is_the_score(score):
    reward = made(sample_rewards.trl_returns)
    assert reward(Answer("p", "c", {"returned": [score]})) == score
    assert reward(Answer("p", "c", {"returned": np.array([score])})) == score


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (0.5, "trl_returns returned float; a list with the one completion's score"),
        ("0", "returned str; a list"),
        ({"score": 1.0}, "returned dict; a list"),
        ([], "returned 0 scores for 1 completion"),
        ([0.0, 1.0], "returned 2 scores for 1 completion; each answer is scored alone"),
        ([None], "returned None, so the answer has no score"),
    ],
    ids=["number", "text", "mapping", "empty", "too long", "none"],
)
def test_what_is_no_list_of_one_number_is_an_error(returned, why):
    with pytest.raises(RewardError, match=why):
        made(sample_rewards.trl_returns)(Answer("p", "c", {"returned": returned}))


@pytest.mark.parametrize(
    ("function", "row"),
    [
        (sample_rewards.trl_returns, {"level": 1}),
        (sample_rewards.narrow_areal_reward, {"level": 1}),
    ],
    ids=["trl", "areal"],
)
def test_a_row_without_what_a_function_names_is_a_data_error(function, row):
    with pytest.raises(DataError, match=r"the row has no (returned|answer), .* it has \['level'\]"):
        made(function)(Answer("p", "c", row))


def test_parameters_are_filled_by_position_where_they_have_no_name():
    assert made(sample_rewards.positional_reward)(ANSWER) == 1.0
    assert made(sample_rewards.positional_reward, bonus=0.5, extra=1)(ANSWER) == 2.5


def test_a_partial_is_a_function():
    reward = as_factory(partial(sample_rewards.compute_score, method="loose"))
    assert pickle.loads(pickle.dumps(reward))()(ANSWER).details["how"] == "loose"


def completion_reward(prompt, completion):
    return 1.0


def annotated_reward(question: str, reply: str) -> float:
    return 1.0


def half_areal_reward(prompt, completions, **kwargs):
    return 1.0


@pytest.mark.parametrize("function", [completion_reward, annotated_reward, half_areal_reward])
def test_another_signature_is_refused_with_those_that_are_known(function):
    with pytest.raises(
        ConfigError, match=rf"^{function.__name__}\(.* is no reward function"
    ) as caught:
        register_reward("test/unknown", function)
    for known in ("(answer)", "TRL's (prompts", "verl's (data_source", "AReaL's (prompt"):
        assert known in caught.value.message
    register_reward(
        "test/unknown", "tests.unit.gateway.sample_rewards:Scores"
    )  # the name is not taken
    REWARDS._targets.pop("test/unknown")


@pytest.mark.parametrize(
    ("function", "args", "why"),
    [
        (
            lambda question, reply: 1.0,
            {},
            "required, and not set.*if <lambda> is the reward itself",
        ),
        (lambda: 1.0, {}, "<lambda> made float, which is no reward; if <lambda> is the reward"),
        (lambda reply: 1.0, {"reply": "a"}, "<lambda> made float, which is no reward"),
    ],
    ids=["it wants arguments", "it returns a score", "it returns a score of its arguments"],
)
def test_a_factory_that_makes_no_reward_is_told_what_a_reward_is(function, args, why):
    with pytest.raises(ConfigError, match=rf"(?s)reward 'name'.*{why}.*TRL's"):
        build_reward(as_factory(function), "name", args)


def test_a_function_that_no_answer_could_fill_is_refused():
    with pytest.raises(ConfigError, match="trainer_state, which only a trainer of TRL has"):
        as_factory(lambda completions, trainer_state, **kwargs: [0.0])
    with pytest.raises(ConfigError, match="is an object; register its class"):
        as_factory(sample_rewards.Scores())
    with pytest.raises(ConfigError, match="cannot be called; register its class"):
        as_factory(sample_rewards.OutUntil(1))
    with pytest.raises(ConfigError, match="make it async"):
        as_factory(lambda answer, services: 0.0)


def test_the_rewards_of_the_example_judge():
    file = Path(__file__).parents[3] / "examples" / "rewards" / "my_rewards.py"
    spec = importlib.util.spec_from_file_location("my_rewards", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    row = {"answer": "2+2\n#### 4", "ground_truth": "4", "keywords": ["4", "Five"]}
    answer = Answer("2+2=", "4", row, (1,), (2,))
    assert make_reward("brevity", {"per_token": 0.5})(answer) == -0.5
    assert make_reward("gsm8k_areal", {})(answer) == 1.0
    boxed = Answer("2+2=", r"It is \boxed{4}", {"answer": "4"})
    assert make_reward("boxed_trl", {})(boxed) == 1.0
    chat = replace(boxed, messages=[{"role": "user", "content": "2+2="}])
    assert make_reward("boxed_trl", {})(chat) == 1.0
    assert make_reward("boxed_trl", {})(replace(chat, completion="4")) == 0.0
    assert make_reward("my_compute_score", {})(answer) == RewardResult(1.0, {"length": 1})
    assert make_reward("keywords", {})(answer).score == 0.5
