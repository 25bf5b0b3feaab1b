import numpy as np
import pytest

from gateway.filters.base import FILTERS, filter_schema, make_filter, register_filter
from headway.contracts.errors import ConfigError, UnknownName
from headway.contracts.types import Trajectory, TrajectoryGroup


def make_group(rewards, lengths=None, stop_reasons=None):
    lengths = lengths or [4] * len(rewards)
    stop_reasons = stop_reasons or ["stop"] * len(rewards)
    return TrajectoryGroup(
        "r",
        "g",
        tuple(
            Trajectory(
                rollout_id="r",
                group_id="g",
                sample_index=index,
                input_ids=np.zeros(2 + length, np.int32),
                loss_mask=np.array([False] * 2 + [True] * length),
                logprobs=np.zeros(2 + length, np.float32),
                versions=np.zeros(2 + length, np.int32),
                reward=reward,
                stop_reason=reason,
            )
            for index, (reward, length, reason) in enumerate(
                zip(rewards, lengths, stop_reasons, strict=True)
            )
        ),
    )


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.0, 1.0], None),
        ([0.0, 0.0], "mean reward is not above 0"),
        ([1.0, 1.0], "mean reward is not below 1"),
        ([-1.0, 0.5], "mean reward is not above 0"),
        ([0.5], None),
    ],
)
def test_reward_range_keeps_what_is_neither_too_hard_nor_too_easy(rewards, reason):
    assert make_filter("reward_range", {}).keep(make_group(rewards)) == reason


def test_reward_range_takes_other_bounds():
    kept = make_filter("reward_range", {"low": 0.2, "high": 0.8})
    assert kept.keep(make_group([1.0, 0.0])) is None
    assert kept.keep(make_group([1.0, 1.0, 1.0, 0.0, 1.0, 1.0])) == "mean reward is not below 0.8"


@pytest.mark.parametrize(
    ("rewards", "above", "is_kept"),
    [
        ([0.0, 1.0], 0.0, True),
        ([0.3, 0.3, 0.3], 0.0, False),
        ([1.0], 0.0, False),
        ([0.0, 1.0], 0.5, False),
        ([0.0, 1.0], 0.49, True),
    ],
)
def test_reward_spread_keeps_what_has_advantages(rewards, above, is_kept):
    reason = make_filter("reward_spread", {"above": above}).keep(make_group(rewards))
    assert reason == (None if is_kept else f"rewards spread no more than {above:g}")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({}, None),
        ({"min_tokens": 3, "max_tokens": 9}, None),
        ({"min_tokens": 4}, "an answer is shorter than 4 tokens"),
        ({"max_tokens": 8}, "an answer is longer than 8 tokens"),
        ({"max_truncated": 0.5}, None),
        ({"max_truncated": 0.25}, "more than 0.25 of the answers were cut off"),
    ],
    ids=["none", "within", "short", "long", "half cut", "too many cut"],
)
def test_length_counts_sampled_tokens(args, reason):
    group = make_group([0.0, 1.0], [3, 9], ["stop", "length"])
    assert make_filter("length", args).keep(group) == reason


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("reward_range", {"low": 1, "high": 1}, "no group would be kept"),
        ("reward_range", {"lo": 1}, "unknown key lo; did you mean 'low'"),
        ("reward_spread", {"above": -1}, "above"),
        ("reward_spread", {"above": float("nan")}, "above"),
        ("length", {"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 exceeds max_tokens=4"),
    ],
    ids=["empty", "name", "negative", "nan", "crossed"],
)
def test_arguments_that_make_no_sense_are_refused(name, args, message):
    with pytest.raises(ConfigError, match=message):
        make_filter(name, args)


def test_an_unknown_filter_is_refused():
    with pytest.raises(UnknownName, match="did you mean 'reward_range'"):
        make_filter("reward_rang", {})


class EvenLength:
    """Keeps groups of an even number of trajectories."""

    def keep(self, group):
        return "odd" if len(group.trajectories) % 2 else None


def test_filters_of_users_join_by_name():
    register_filter("test/even", EvenLength)
    assert make_filter("test/even", {}).keep(make_group([1.0])) == "odd"


@pytest.mark.parametrize("name", sorted(FILTERS._targets))
def test_every_filter_tells_its_arguments_and_what_it_does(name):
    assert filter_schema(name)["type"] == "object"
    assert FILTERS.get(name).__doc__
