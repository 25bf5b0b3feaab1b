import numpy as np
import pytest

from gateway.trajectories.sample import Sample
from gateway.trajectories.transcript import Transcript
from headway.contracts.errors import BackendError
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import LLMResponse, Prompt, RewardResult, Turn

SAMPLE = Sample("r1", Prompt(group_id="g7", group_size=4, text="hello"), 2)


def response(tokens, logprobs, runs, stop_reason="stop") -> LLMResponse:
    return LLMResponse(
        rid="r1.2",
        output_tokens=tokens,
        output_logprobs=logprobs,
        version_runs=runs,
        stop_reason=stop_reason,
        latency_s=0.1,
        ttft_s=0.1,
    )


def test_a_row_holds_what_was_shown_and_what_was_sampled_in_order():
    row = Transcript([1, 6])
    assert row.sample(response([7, 8], [-0.1, -0.2], [(3, 0, 1), (4, 1, 2)])) == 0
    row.observe([3, 4])
    assert row.ids == (1, 6, 7, 8, 3, 4)
    assert row.sample(response([2], [-0.3], [(5, 0, 1)], "length")) == 1
    assert (len(row), row.ids_of(0), row.ids_of(-1)) == (7, [7, 8], [2])

    done = row.trajectory(SAMPLE, RewardResult(0.5, {"why": "half"}, "wrong_answer"), branch=1)
    np.testing.assert_array_equal(done.input_ids, np.array([1, 6, 7, 8, 3, 4, 2], np.int32))
    np.testing.assert_array_equal(done.loss_mask, [False, False, True, True, False, False, True])
    np.testing.assert_array_equal(
        done.logprobs, np.array([0, 0, -0.1, -0.2, 0, 0, -0.3], np.float32)
    )
    np.testing.assert_array_equal(done.versions, np.array([-1, -1, 3, 4, -1, -1, 5], np.int32))
    assert (done.input_ids.dtype, done.loss_mask.dtype) == (np.int32, np.bool_)
    assert (done.logprobs.dtype, done.versions.dtype) == (np.float32, np.int32)
    assert done.turns == (Turn(2, 4, "stop"), Turn(6, 7, "length"))
    assert (done.trajectory_id, done.group_id, done.oldest_version) == ("r1/2.1", "g7", 3)
    assert (done.reward, done.verdict, done.details) == (0.5, "wrong_answer", {"why": "half"})
    assert done.stop_reason == "length"


def test_one_turn_is_told_only_if_there_is_something_to_tell():
    row = Transcript([1])
    row.sample(response([7], [-0.1], [(3, 0, 1)]))
    assert row.trajectory(SAMPLE, RewardResult(1.0)).turns == ()
    row.annotate(0, seen="something")
    row.annotate(-1, reward=0.25)
    row.annotate(0, more=2)
    turn = Turn(1, 2, "stop", 0.25, {"seen": "something", "more": 2})
    assert row.trajectory(SAMPLE, RewardResult(1.0)).turns == (turn,)


def test_a_reason_to_end_overrules_that_of_the_last_turn():
    row = Transcript([1])
    row.sample(response([7], [-0.1], [(3, 0, 1)]))
    assert row.trajectory(SAMPLE, RewardResult(1.0), stop_reason="length").stop_reason == "length"


@pytest.mark.parametrize(
    ("logprobs", "runs"),
    [([-0.1], [(3, 0, 2)]), ([-0.1, -0.2], [(3, 0, 1)]), ([-0.1] * 3, [(3, 0, 2)])],
    ids=["a logprob is missing", "a version is missing", "a logprob too many"],
)
def test_columns_that_do_not_match_are_a_fault_of_the_server(logprobs, runs):
    row = Transcript([1])
    with pytest.raises(BackendError, match=r"'r1\.2' was answered with 2 tokens"):
        row.sample(response([7, 8], logprobs, runs))
    assert (row.ids, row.turns) == ((1,), ())


def masked(tokens: list[int], *sets: tuple[int, ...]) -> LLMResponse:
    mask = SamplingMask.of([np.array(ids, np.int32) for ids in sets])
    plain = response(tokens, [-0.1] * len(tokens), [(3, 0, len(tokens))])
    return plain.model_copy(update={"sampling_mask": mask})


def test_masks_of_turns_are_one_over_the_row():
    row = Transcript([1, 6])
    row.sample(masked([7, 8], (7, 9), ()))
    row.observe([3])
    row.sample(response([2], [-0.3], [(3, 0, 1)]))
    row.sample(masked([4], (4,)))
    row.observe([5])
    mask = row.trajectory(SAMPLE, RewardResult(1.0)).sampling_mask
    assert mask.counts.tolist() == [0, 0, 2, 0, 0, 0, 1, 0]
    assert mask.tokens.tolist() == [7, 9, 4]
    assert Transcript([1]).trajectory(SAMPLE, RewardResult(1.0)).sampling_mask is None


def test_a_mask_without_a_token_that_was_drawn_is_a_fault_of_the_server():
    row = Transcript([1])
    with pytest.raises(BackendError, match="without the token 8 that was drawn at 1"):
        row.sample(masked([7, 8], (7,), (9,)))
    assert (row.ids, row.turns) == ((1,), ())
