import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load, save

from headway.contracts.codec import decode_groups, encode_groups, join_payloads
from headway.contracts.errors import DataError
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import Trajectory, TrajectoryGroup, Turn
from tests.unit.gateway.rollout_builders import make_group, make_trajectory

COLUMNS = ("input_ids", "loss_mask", "logprobs", "versions")
FIELDS = ("rollout_id", "group_id", "sample_index", "stop_reason")
NOTES = ("verdict", "details", "turns", "branch", "trajectory_id")


def assert_equal_bits(left: tuple[TrajectoryGroup, ...], right: tuple[TrajectoryGroup, ...]):
    assert [(g.rollout_id, g.group_id) for g in left] == [(g.rollout_id, g.group_id) for g in right]
    for one, other in zip(left, right, strict=True):
        for a, b in zip(one.trajectories, other.trajectories, strict=True):
            for name in COLUMNS:
                x, y = getattr(a, name), getattr(b, name)
                assert x.dtype == y.dtype
                assert x.tobytes() == y.tobytes(), name
            assert [getattr(a, name) for name in FIELDS] == [getattr(b, name) for name in FIELDS]
            assert a.sampling_mask == b.sampling_mask
            assert np.float32(a.reward).tobytes() == np.float32(b.reward).tobytes()


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def masks(draw, length: int) -> SamplingMask:
    ids = st.lists(st.integers(0, 2**31 - 1), max_size=3)
    sets = draw(st.lists(ids, min_size=length, max_size=length))
    return SamplingMask.of([np.array(each, np.int32) for each in sets])


@st.composite
def trajectories(draw, rollout_id: str, group_id: str, index: int) -> Trajectory:
    length = draw(st.integers(1, 12))
    ints = arrays.arrays(np.int32, length, elements=st.integers(-(2**31), 2**31 - 1))
    return Trajectory(
        rollout_id=rollout_id,
        group_id=group_id,
        sample_index=index,
        input_ids=draw(ints),
        loss_mask=draw(arrays.arrays(np.bool_, length)),
        logprobs=draw(arrays.arrays(np.float32, length, elements=finite)),
        versions=draw(ints),
        reward=draw(finite),
        stop_reason=draw(st.sampled_from(["stop", "length", "interrupt"])),
        sampling_mask=draw(st.none() | masks(length)),
    )


@st.composite
def groups(draw) -> TrajectoryGroup:
    rollout_id, group_id = draw(st.text(max_size=8)), draw(st.text(max_size=8))
    size = draw(st.integers(1, 3))
    rows = tuple(draw(trajectories(rollout_id, group_id, index)) for index in range(size))
    return TrajectoryGroup(rollout_id, group_id, rows)


@given(st.lists(groups(), max_size=4).map(tuple))
def test_round_trip_is_bit_exact(batch):
    assert_equal_bits(decode_groups(encode_groups(batch)), batch)


@given(st.lists(groups(), min_size=1, max_size=4))
def test_joined_payloads_are_those_of_all_groups(batch):
    joined = join_payloads([encode_groups([group]) for group in batch])
    assert_equal_bits(tuple(batch), decode_groups(joined))


@given(st.lists(groups(), max_size=4))
def test_payloads_are_those_of_the_safetensors_library(batch):
    payload = encode_groups(batch)
    header, data = opened(payload)
    other, same_data = opened(save(load(payload), header["__metadata__"]))
    assert list(header) == list(other)  # in the order of their columns
    assert (header, data) == (other, same_data)
    assert (len(payload) - len(data)) % 8 == 0


def opened(payload: bytes) -> tuple[dict, bytes]:
    """Header and columns of a payload."""
    start = 8 + int.from_bytes(payload[:8], "little")
    return json.loads(payload[8:start]), payload[start:]


def test_payloads_of_a_former_schema_join_with_those_of_this_one():
    path = Path(__file__).parents[2] / "contract" / "data" / "trajectories-schema-1.safetensors"
    payloads = [path.read_bytes(), encode_groups([make_group("new")])]
    joined = decode_groups(join_payloads(payloads))
    assert [group.rollout_id for group in joined] == ["run-7:12", "run-7:13", "new"]


def test_notes_travel_with_their_trajectory():
    row = replace(
        make_trajectory("r"),
        verdict="wrong_answer",
        details={"seen": ["x"]},
        turns=(Turn(1, 2, "stop", 0.5, {"tool": "calculator"}), Turn(2, 3, "length")),
        branch=2,
    )
    group = TrajectoryGroup("r", "g", (make_trajectory("r"), row))
    for payload in (encode_groups([group]), join_payloads([encode_groups([group])] * 2)):
        back = decode_groups(payload)[0].trajectories[1]
        assert [getattr(back, name) for name in NOTES] == [getattr(row, name) for name in NOTES]


def test_a_turn_beyond_its_row_is_refused():
    row = replace(make_trajectory("r"), turns=(Turn(1, 99, "stop"),))
    with pytest.raises(DataError, match="turns beyond 3 tokens"):
        decode_groups(encode_groups([TrajectoryGroup("r", "g", (row,))]))


def test_no_groups_are_a_payload_too():
    assert decode_groups(encode_groups([])) == ()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_logprob_that_is_not_finite_is_refused(bad):
    row = make_trajectory("r7", 3, versions=(4, 5), logprobs=(-0.5, bad))
    with pytest.raises(DataError, match=r"r7/3 holds a logprob or reward that is not finite"):
        encode_groups([TrajectoryGroup("r7", "g", (row,))])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e39])
def test_a_reward_that_is_not_finite_is_refused(bad):
    row = make_trajectory("r7", 3, reward=bad)
    with pytest.raises(DataError, match="not finite"):
        encode_groups([TrajectoryGroup("r7", "g", (row,))])


def test_columns_of_unequal_length_are_refused():
    row = make_trajectory("r7", versions=(0, 0))
    short = Trajectory(**{**{f: getattr(row, f) for f in row.__slots__}, "logprobs": np.zeros(2)})
    with pytest.raises(DataError, match=r"r7/0 has columns of unequal length"):
        encode_groups([TrajectoryGroup("r7", "g", (short,))])


def test_a_column_of_another_type_is_refused():
    row = replace(make_trajectory("r7"), versions=np.zeros(3, np.int64))
    with pytest.raises(DataError, match=r"r7/0 has versions of int64; int32 is wanted"):
        encode_groups([TrajectoryGroup("r7", "g", (row,))])


def test_a_trajectory_without_tokens_is_refused():
    empty = Trajectory(
        rollout_id="r7",
        group_id="g",
        sample_index=0,
        input_ids=np.empty(0, np.int32),
        loss_mask=np.empty(0, np.bool_),
        logprobs=np.empty(0, np.float32),
        versions=np.empty(0, np.int32),
        reward=0.0,
        stop_reason="stop",
    )
    with pytest.raises(DataError):
        encode_groups([TrajectoryGroup("r7", "g", (empty,))])


def test_oldest_version_looks_at_sampled_tokens_of_all_siblings():
    group = TrajectoryGroup(
        "r", "g", (make_trajectory("r", 0, (5, 7)), make_trajectory("r", 1, (4, 6)))
    )
    (back,) = decode_groups(encode_groups([group]))
    assert back.oldest_version == 4
    assert make_group(version=3).oldest_version == 3


def test_a_mask_of_another_length_is_not_written():
    row = replace(make_trajectory(), sampling_mask=SamplingMask.whole(99))
    with pytest.raises(DataError, match="has a sampling mask of 99 positions"):
        encode_groups([TrajectoryGroup("r", "g", (row,))])


def test_a_mask_whose_counts_are_others_is_not_read():
    row = make_trajectory()
    mask = SamplingMask.of([np.array([4, 5], np.int32)] * row.num_tokens)
    payload = encode_groups([TrajectoryGroup("r", "g", (replace(row, sampling_mask=mask),))])
    header, _ = opened(payload)
    columns = load(payload)
    columns["mask_counts"] = columns["mask_counts"] + 1
    with pytest.raises(DataError, match=r"a sampling mask of \d+ tokens has other counts"):
        decode_groups(save(columns, header["__metadata__"]))
    columns["mask_counts"] = columns["mask_counts"][1:]
    with pytest.raises(DataError, match="sampling masks of"):
        decode_groups(save(columns, header["__metadata__"]))
