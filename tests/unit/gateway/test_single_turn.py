import numpy as np
import pytest

from gateway.rewards.base import Answer
from gateway.trajectories.sample import Sample
from gateway.workflows.base import (
    WORKFLOWS,
    RolloutContext,
    make_workflow,
    register_workflow,
    workflow_schema,
)
from headway.contracts.config.base import WorkflowRef
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import ConfigError, RewardError, UnknownName
from headway.contracts.types import LLMRequest, LLMResponse, Prompt, RewardResult
from tests.unit.gateway.games import NOTHING

PROMPT = Prompt(group_id="g7", group_size=4, text="hello", data={"answer": "world"})


class Generator:
    """Answers `world x </s>`, the second token under a newer version."""

    def __init__(self) -> None:
        self.requests: list[LLMRequest] = []

    async def __call__(self, req: LLMRequest) -> LLMResponse:
        self.requests.append(req)
        return LLMResponse(
            rid=req.rid,
            output_tokens=[7, 8, 2],
            output_logprobs=[-0.1, -0.2, -0.3],
            version_runs=[(4, 0, 1), (5, 1, 3)],
            stop_reason="stop",
            latency_s=0.1,
            ttft_s=0.1,
        )


async def score(answer: Answer) -> RewardResult:
    assert (answer.prompt, answer.completion) == ("hello", "world x")
    assert (answer.prompt_ids, answer.completion_ids) == ([1, 6], [7, 8, 2])
    assert answer.data == {"answer": "world"}
    return RewardResult(0.75, {"seen": "x"}, "wrong_answer")


def workflow(tokenizer, **sampling):
    return make_workflow(WorkflowRef(name="single_turn"), tokenizer, SamplingConfig(**sampling))


async def play(workflow, index=0, generate=None, score=score, rollout_id="r1"):
    context = RolloutContext(generate or Generator(), score, NOTHING)
    (row,) = await workflow.run(Sample(rollout_id, PROMPT, index), context)
    return row


async def test_a_trajectory_holds_prompt_and_answer(plain_tokenizer):
    generate = Generator()
    row = await play(workflow(plain_tokenizer), 2, generate)
    assert (row.rollout_id, row.group_id, row.sample_index) == ("r1", "g7", 2)
    np.testing.assert_array_equal(row.input_ids, np.array([1, 6, 7, 8, 2], np.int32))
    np.testing.assert_array_equal(row.loss_mask, [False, False, True, True, True])
    np.testing.assert_array_equal(row.logprobs, np.array([0, 0, -0.1, -0.2, -0.3], np.float32))
    np.testing.assert_array_equal(row.versions, np.array([-1, -1, 4, 5, 5], np.int32))
    assert (row.reward, row.stop_reason, row.oldest_version) == (0.75, "stop", 4)
    assert (row.verdict, row.details, row.turns) == ("wrong_answer", {"seen": "x"}, ())
    (request,) = generate.requests
    assert (request.rid, request.input_ids) == ("r1.2", (1, 6))
    assert request.metadata == {"group_id": "g7"}


async def test_siblings_of_a_seeded_group_have_seeds_and_names_of_their_own(plain_tokenizer):
    generate = Generator()
    for index in range(3):
        await play(workflow(plain_tokenizer, seed=10), index, generate)
    assert [request.gconfig.seed for request in generate.requests] == [10, 11, 12]
    assert len({request.rid for request in generate.requests}) == 3


async def test_the_largest_seed_has_siblings_too(plain_tokenizer):
    generate = Generator()
    await play(workflow(plain_tokenizer, seed=2**63 - 1), 1, generate)
    assert generate.requests[0].gconfig.seed == 0


async def test_the_longest_rollout_id_leaves_each_sample_a_name(plain_tokenizer):
    generate = Generator()
    for index in range(2):
        await play(workflow(plain_tokenizer), index, generate, rollout_id="r" * 128)
    first, second = (request.rid for request in generate.requests)
    assert first != second
    assert len(first) == len(second) == 128


async def test_without_a_seed_the_server_draws_one(plain_tokenizer):
    generate = Generator()
    await play(workflow(plain_tokenizer), 1, generate)
    assert generate.requests[0].gconfig.seed is None


async def test_a_failing_verdict_is_no_trajectory(plain_tokenizer):
    async def fails(answer: Answer) -> RewardResult:
        raise RewardError("hung")

    with pytest.raises(RewardError, match="hung"):
        await play(workflow(plain_tokenizer), score=fails)


def test_unknown_names_arguments_and_versions_are_refused(plain_tokenizer):
    def make(**ref):
        return make_workflow(WorkflowRef(**ref), plain_tokenizer, SamplingConfig())

    with pytest.raises(UnknownName, match="did you mean 'single_turn'"):
        make(name="single_trun")
    with pytest.raises(ConfigError, match="unknown key turns"):
        make(name="single_turn", args={"turns": 2})
    with pytest.raises(ConfigError, match="has version '1' here, '2' is wanted"):
        make(name="single_turn", version="2")
    assert make(name="single_turn", version="1")


def test_a_class_that_is_no_workflow_is_refused(plain_tokenizer, monkeypatch):
    monkeypatch.setattr(WORKFLOWS, "_targets", dict(WORKFLOWS._targets))
    with pytest.raises(
        ConfigError, match=r"'mine' is .*Generator.*, which lacks version, Args, run"
    ):
        register_workflow("mine", Generator)
    register_workflow("mine", "tests.unit.gateway.games:Judge")
    with pytest.raises(ConfigError, match=r"'mine' is .*Judge.*, which lacks version, Args, run"):
        make_workflow(WorkflowRef(name="mine"), plain_tokenizer, SamplingConfig())


def test_arguments_are_told_as_a_schema():
    schema = workflow_schema("single_turn")
    assert (schema["type"], schema["additionalProperties"]) == ("object", False)


async def test_the_first_sample_of_a_group_is_greedy_if_asked(plain_tokenizer):
    ref = WorkflowRef(name="single_turn", args={"greedy_first": True})
    workflow = make_workflow(ref, plain_tokenizer, SamplingConfig(temperature=0.7))
    generate = Generator()
    for index in range(3):
        await play(workflow, index, generate)
    assert [req.gconfig.temperature for req in generate.requests] == [0.0, 0.7, 0.7]
