import pytest

from gateway.trajectories.sample import Sample
from gateway.workflows.base import RolloutContext, make_workflow
from headway.contracts.config.base import WorkflowRef
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import RequestTooLong, RewardOutage
from headway.contracts.types import Prompt, RewardResult
from tests.unit.gateway.games import NOTHING, Judge, ScriptedPolicy, byte_tokenizer, check_row, said

PROMPT = Prompt(group_id="g7", group_size=2, text="2+2=")


async def play(tmp_path, replies, decide, index=0, max_context=None, **sampling):
    policy = ScriptedPolicy(replies, max_context)
    ref = WorkflowRef(name="best_of_n", args={"n": len(replies)})
    workflow = make_workflow(ref, byte_tokenizer(tmp_path, None), SamplingConfig(**sampling))
    rows = await workflow.run(
        Sample("r1", PROMPT, index), RolloutContext(policy, Judge(decide), NOTHING)
    )
    return rows, policy


def by_number(text: str) -> RewardResult:
    return RewardResult(float(text), {"saw": text}, "wrong_answer")


async def test_the_best_candidate_becomes_the_trajectory(tmp_path):
    replies = [said("1", 3), said("7", 4, is_swapped=True), said("5", 5), said("7", 6)]
    (row,), policy = await play(tmp_path, replies, by_number)
    check_row(row, "2+2=", replies[1])
    assert (row.reward, row.verdict, row.turns, row.branch) == (7.0, "wrong_answer", (), 0)
    assert row.details == {"saw": "7", "scores": [1.0, 7.0, 5.0, 7.0], "chosen": 1}
    assert {request.input_ids for request in policy.requests} == {tuple(row.input_ids[:-1])}


async def test_candidates_of_siblings_have_names_and_seeds_of_their_own(tmp_path):
    requests = []
    for index in range(2):
        _, policy = await play(tmp_path, [said("1")] * 3, by_number, index, seed=10)
        requests += policy.requests
    assert len({request.rid for request in requests}) == 6
    assert sorted(request.gconfig.seed for request in requests) == list(range(10, 16))


async def test_one_candidate_that_cannot_be_judged_is_an_outage_of_all(tmp_path):
    def decide(text: str) -> RewardResult:
        if text == "2":
            raise RewardOutage("no verifier")
        return RewardResult(1.0)

    with pytest.raises(RewardOutage, match="no verifier"):
        await play(tmp_path, [said("1"), said("2"), said("3")], decide)


async def test_a_prompt_without_room_is_an_error(tmp_path):
    with pytest.raises(RequestTooLong):
        await play(tmp_path, [said("1")], by_number, max_context=4)
