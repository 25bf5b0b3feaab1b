from dataclasses import replace

import pytest
from pydantic import ValidationError

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.experiment import GRPOExperiment, PPOExperiment
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.http.rollouts import SubmitRequest, WaitRequest
from headway.contracts.http.servers import ServerReport
from headway.contracts.http.weights import WeightUpdateRequest
from headway.contracts.types import (
    FinetuneSpec,
    LLMRequest,
    LLMResponse,
    Prompt,
    RolloutRequest,
    TrajectoryBatch,
    TrajectoryGroup,
)
from tests.unit.gateway.rollout_builders import make_group, make_request, make_trajectory


@pytest.mark.parametrize(
    "content",
    [{"text": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}, {"input_ids": [1]}],
    ids=lambda c: next(iter(c)),
)
def test_a_prompt_has_one_content(content):
    assert Prompt(group_id="g", **content).group_size == 1


@pytest.mark.parametrize(
    "content",
    [{}, {"text": "hi", "input_ids": [1]}, {"text": "hi", "messages": [], "input_ids": []}],
    ids=lambda c: "+".join(c) or "nothing",
)
def test_a_prompt_with_none_or_several_contents_is_refused(content):
    with pytest.raises(ValidationError, match="give one of text, messages, input_ids"):
        Prompt(group_id="g", **content)


@pytest.mark.parametrize(
    "fields",
    [
        {"group_size": 0},
        {"group_size": 1025},
        {"group_id": ""},
        {"group_id": "a b"},
        {"group_id": "a/b"},
        {"group_id": "a\n"},
        {"group_id": "x" * 129},
        {"input_ids": [-1]},
        {"input_ids": [2**31]},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_prompt_out_of_bounds_is_refused(fields):
    with pytest.raises(ValidationError):
        Prompt(**{"group_id": "g", "input_ids": [1], **fields})


def test_records_from_outside_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        make_request().prompt.group_size = 3


def test_a_request_survives_json():
    request = make_request(prompt=Prompt(group_id="g", text="täxt", data={"a": [1, {"b": None}]}))
    assert RolloutRequest.model_validate_json(request.model_dump_json()) == request


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"min_p": -0.1},
        {"seed": -1},
        {"seed": 2**63},
        {"stop_token_ids": list(range(65))},
        {"min_new_tokens": 5, "max_new_tokens": 4},
    ],
    ids=str,
)
def test_sampling_out_of_bounds_is_refused(fields):
    with pytest.raises(ValidationError):
        SamplingConfig(**fields)


def test_an_empty_request_cannot_be_generated():
    with pytest.raises(ValidationError):
        LLMRequest(rid="r", input_ids=())


def test_version_runs_expand_to_one_version_per_token():
    response = LLMResponse(
        rid="r",
        output_tokens=[1, 2, 3],
        output_logprobs=[0.0] * 3,
        version_runs=[(4, 0, 1), (6, 1, 3)],
        stop_reason="stop",
        latency_s=0.0,
        ttft_s=0.0,
    )
    assert response.output_versions == [4, 6, 6]


def test_oldest_version_ignores_the_prompt():
    assert make_trajectory(versions=(3, 2)).oldest_version == 2
    assert make_trajectory(versions=()).oldest_version == -1
    rows = (make_trajectory(versions=(3,)), make_trajectory(versions=(5,)))
    assert TrajectoryGroup("r", "g", rows).oldest_version == 3


def test_a_batch_lists_its_rows_group_by_group():
    batch = TrajectoryBatch((make_group("a", 2), make_group("b", 1)))
    assert batch.rollout_ids == ["a", "b"]
    assert [row.trajectory_id for row in batch.trajectories] == ["a/0", "a/1", "b/0"]


def test_an_incomplete_last_batch_is_no_step():
    assert FinetuneSpec(3, dataset_size=10, train_batch_size=4).total_train_steps == 6


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (SubmitRequest, {"rollouts": []}),
        (WaitRequest, {"delivery_id": "d", "count": 0}),
        (WaitRequest, {"delivery_id": "d", "count": 1, "timeout_s": 61}),
        (WeightUpdateRequest, {"version": -1, "path": "/w"}),
        (WeightUpdateRequest, {"version": 1, "path": "/w\x00"}),
        (ServerReport, {"server_id": "s", "url": "ftp://host", "version": 0}),
        (ServerReport, {"server_id": "s", "url": "http://host/path", "version": 0}),
    ],
    ids=str,
)
def test_bodies_out_of_bounds_are_refused(model, fields):
    with pytest.raises(ValidationError):
        model(**fields)


def experiment(kind=GRPOExperiment, **sections):
    tree = {
        "model": {"path": "m"},
        "data": {"path": "d", "batch_size": 4},
        "rollout": {"reward": {"name": "exact"}, "group_size": 8},
        "weight_sync": {"root": "w"},
    }
    return kind.model_validate(tree | sections)


def test_a_batch_is_prompts_times_siblings():
    assert experiment().batch_trajectories == 32


def test_more_minibatches_than_prompts_are_refused():
    with pytest.raises(ValidationError, match=r"num_minibatches=5 exceeds\s+data.batch_size=4"):
        experiment(algorithm=AlgorithmConfig(num_minibatches=5))


def test_a_head_without_tokens_is_refused():
    with pytest.raises(ValidationError, match=r"model\.head=value predicts no tokens"):
        experiment(model={"path": "m", "head": "value"})


TEACHERS = {"urls": ["http://127.0.0.1:1"]}


@pytest.mark.parametrize(
    ("kind", "sections", "message"),
    [
        (
            GRPOExperiment,
            {"algorithm": {"advantage": {"type": "gae"}}},
            "wants a critic; set type=ppo",
        ),
        (GRPOExperiment, {"critic": {}}, "Extra inputs"),
        (GRPOExperiment, {"reference": {"path": "r"}}, r"while algorithm\.kl_coef=0"),
        (GRPOExperiment, {"reference": {"ema_eta": 0.1}}, r"while algorithm\.kl_coef=0"),
        (
            GRPOExperiment,
            {"reference": {"path": "r", "ema_eta": 0.1}, "algorithm": {"kl_coef": 0.1}},
            "leave out path=r",
        ),
        (GRPOExperiment, {"algorithm": {"distillation_coef": 1.0}}, "wants a teacher"),
        (GRPOExperiment, {"teacher": {"path": "t"}}, "learns nothing of a teacher"),
        (GRPOExperiment, {"teacher_servers": TEACHERS}, "learns nothing of a teacher"),
        (
            GRPOExperiment,
            {
                "algorithm": {"distillation_coef": 1.0},
                "teacher": {"path": "t"},
                "teacher_servers": TEACHERS,
            },
            "two sources of one column",
        ),
        (
            GRPOExperiment,
            {
                "algorithm": {"distillation_coef": 1.0},
                "teacher_servers": TEACHERS,
                "sampling": {"temperature": 0.5},
            },
            r"temperature=0\.5, .* score prompts at",
        ),
        (
            GRPOExperiment,
            {
                "algorithm": {"distillation_coef": 1.0},
                "teacher_servers": TEACHERS,
                "sampling": {"top_p": 0.9},
            },
            r"top_p=0\.9 .* over all tokens only",
        ),
        (
            GRPOExperiment,
            {
                "algorithm": {"distillation_coef": 1.0, "distillation_top_k": 8},
                "teacher": {"path": "t"},
                "sampling": {"min_p": 0.1},
            },
            r"min_p=0\.1, .* compares whole distributions",
        ),
        (
            GRPOExperiment,
            {
                "algorithm": {"distillation_coef": 1.0, "distillation_top_k": 8},
                "teacher_servers": {"urls": ["http://a:1", "http://b:1"]},
            },
            "tokens of one teacher, and .* has 2",
        ),
        (GRPOExperiment, {"algorithm": {"distillation_top_k": 8}}, "wants a teacher"),
        (
            GRPOExperiment,
            {"teacher_servers": TEACHERS | {"weights": [1.0, 2.0]}},
            "weights has 2 values for 1 urls",
        ),
        (PPOExperiment, {"algorithm": {"advantage": {"type": "opo"}}}, "opo reads no values"),
        (
            GRPOExperiment,
            {"algorithm": {"advantage": {"type": "remax"}}},
            "greedy sample; set rollout",
        ),
        (
            GRPOExperiment,
            {
                "rollout": {
                    "reward": {"name": "exact"},
                    "workflow": {"name": "single_turn", "args": {"greedy_first": True}},
                }
            },
            "samples one answer unlike its siblings",
        ),
        (PPOExperiment, {"critic": {"warmup_steps": 100}}, "leaves no step"),
        (PPOExperiment, {"critic": {"decay": 0.9}}, "belongs to normalization=exponential"),
        (PPOExperiment, {"critic": {"model": {"path": "c", "head": "lm"}}}, "set head=value"),
    ],
)
def test_models_that_contradict_the_algorithm_are_refused(kind, sections, message):
    with pytest.raises(ValidationError, match=message):
        experiment(kind, **sections)


def test_greedy_siblings_are_refused():
    with pytest.raises(ValidationError, match="every advantage is 0"):
        experiment(sampling={"temperature": 0.0})


def test_a_rollout_that_samples_nothing_is_refused():
    SamplingConfig(max_new_tokens=0)  # scores a prompt
    with pytest.raises(ValidationError, match="a rollout samples at least one token"):
        RolloutRequest(
            rollout_id="r",
            prompt=Prompt(group_id="g", text="x"),
            reward=ComponentConfig(name="exact"),
            gconfig=SamplingConfig(max_new_tokens=0),
        )


def test_a_sample_that_forked_counts_once_in_the_mean():
    rows = (
        make_trajectory("r", 0, reward=1.0),
        replace(make_trajectory("r", 0, reward=1.0), branch=1),
        replace(make_trajectory("r", 0, reward=1.0), branch=2),
        make_trajectory("r", 1, reward=0.0),
    )
    group = TrajectoryGroup("r", "g", rows)
    assert (group.rewards, group.mean_reward) == ([1.0, 0.0], 0.5)
