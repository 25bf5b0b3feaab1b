import numpy as np
import pytest

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import ConfigError, RewardError, UnknownName
from headway.contracts.types import LLMRequest, LLMResponse, Prompt, RewardResult
from headway.rollout.workflows.base import Sample, make_workflow

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


async def score(prompt: str, completion: str) -> RewardResult:
    assert (prompt, completion) == ("hello", "world x")
    return RewardResult(0.75)


def workflow(tokenizer, **sampling):
    return make_workflow("single_turn", {}, tokenizer, SamplingConfig(**sampling))


async def test_a_trajectory_holds_prompt_and_answer(plain_tokenizer):
    generate = Generator()
    row = await workflow(plain_tokenizer).run(Sample("r1", PROMPT, 2), generate, score)
    assert (row.rollout_id, row.group_id, row.sample_index) == ("r1", "g7", 2)
    np.testing.assert_array_equal(row.input_ids, np.array([1, 6, 7, 8, 2], np.int32))
    np.testing.assert_array_equal(row.loss_mask, [False, False, True, True, True])
    np.testing.assert_array_equal(row.logprobs, np.array([0, 0, -0.1, -0.2, -0.3], np.float32))
    np.testing.assert_array_equal(row.versions, np.array([-1, -1, 4, 5, 5], np.int32))
    assert (row.reward, row.stop_reason, row.oldest_version) == (0.75, "stop", 4)
    (request,) = generate.requests
    assert request.input_ids == (1, 6)
    assert request.metadata == {"group_id": "g7"}


async def test_siblings_of_a_seeded_group_have_seeds_and_names_of_their_own(plain_tokenizer):
    generate = Generator()
    for index in range(3):
        await workflow(plain_tokenizer, seed=10).run(Sample("r1", PROMPT, index), generate, score)
    assert [request.gconfig.seed for request in generate.requests] == [10, 11, 12]
    assert len({request.rid for request in generate.requests}) == 3


async def test_without_a_seed_the_server_draws_one(plain_tokenizer):
    generate = Generator()
    await workflow(plain_tokenizer).run(Sample("r1", PROMPT, 1), generate, score)
    assert generate.requests[0].gconfig.seed is None


async def test_a_failing_verdict_is_no_trajectory(plain_tokenizer):
    async def fails(prompt: str, completion: str) -> RewardResult:
        raise RewardError("hung")

    with pytest.raises(RewardError, match="hung"):
        await workflow(plain_tokenizer).run(Sample("r1", PROMPT, 0), Generator(), fails)


def test_unknown_names_and_arguments_are_refused(plain_tokenizer):
    with pytest.raises(UnknownName, match="did you mean 'single_turn'"):
        make_workflow("single_trun", {}, plain_tokenizer, SamplingConfig())
    with pytest.raises(ConfigError, match="unknown key turns"):
        make_workflow("single_turn", {"turns": 2}, plain_tokenizer, SamplingConfig())
