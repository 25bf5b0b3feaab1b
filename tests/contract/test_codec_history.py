"""Payloads that a former release wrote are read for as long as their schema is supported."""

import json
from pathlib import Path

import numpy as np

from headway.contracts.codec import decode_groups, encode_groups
from headway.contracts.routed_experts import RoutedExperts
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import Turn

DATA = Path(__file__).parent / "data"
SCHEMA_1 = DATA / "trajectories-schema-1.safetensors"
SCHEMA_2 = DATA / "trajectories-schema-2.safetensors"
SCHEMA_3 = DATA / "trajectories-schema-3.safetensors"
SCHEMA_4 = DATA / "trajectories-schema-4.safetensors"


def test_schema_1_still_decodes():
    first, second = decode_groups(SCHEMA_1.read_bytes())
    assert (first.rollout_id, first.group_id) == ("run-7:12", "prompt-12")
    assert (second.rollout_id, second.group_id) == ("run-7:13", "prompt-13")
    one, two = first.trajectories
    assert (one.sample_index, one.reward, one.stop_reason) == (0, 1.0, "stop")
    assert (two.sample_index, two.reward, two.stop_reason) == (1, -0.5, "length")
    np.testing.assert_array_equal(one.input_ids, np.array([101, 7, 9], np.int32))
    np.testing.assert_array_equal(one.loss_mask, [False, True, True])
    np.testing.assert_array_equal(one.logprobs, np.array([0, -0.1, -2.5], np.float32))
    np.testing.assert_array_equal(one.versions, np.array([-1, 3, 4], np.int32))
    np.testing.assert_array_equal(two.input_ids, np.array([101, 102, 2147483647], np.int32))
    assert two.oldest_version == 4
    assert second.trajectories[0].stop_reason == "interrupt"
    assert second.oldest_version == 0


def test_schema_1_told_nothing_of_verdicts_and_turns():
    for group in decode_groups(SCHEMA_1.read_bytes()):
        for row in group.trajectories:
            assert (row.verdict, row.details, row.turns, row.branch) == ("scored", {}, (), 0)


def test_schema_2_still_decodes():
    first, second = decode_groups(SCHEMA_2.read_bytes())
    one, two = first.trajectories
    assert (one.verdict, one.details, one.trajectory_id) == (
        "accepted",
        {"expected": "4"},
        "run-7:12/0",
    )
    assert one.turns == (Turn(1, 2, "stop", 0.5, {"tool": "calculator"}), Turn(2, 3, "stop"))
    assert (two.verdict, two.turns, two.trajectory_id) == ("timeout", (), "run-7:12/0.1")
    np.testing.assert_array_equal(one.versions, np.array([-1, 3, 4], np.int32))
    assert second.trajectories[0].stop_reason == "interrupt"


def test_schema_2_had_no_sampling_masks():
    for group in decode_groups(SCHEMA_2.read_bytes()):
        assert [row.sampling_mask for row in group.trajectories] == [None] * len(group.trajectories)


def test_schema_3_still_decodes():
    first, second = decode_groups(SCHEMA_3.read_bytes())
    one, two = first.trajectories
    assert one.sampling_mask == SamplingMask(
        np.array([0, 2, 0], np.int32), np.array([7, 2147483647], np.int32)
    )
    assert (two.sampling_mask, two.verdict) == (None, "timeout")
    assert second.trajectories[0].sampling_mask is None


def test_schema_3_had_no_routed_experts():
    for group in decode_groups(SCHEMA_3.read_bytes()):
        assert [row.routed_experts for row in group.trajectories] == [None] * len(
            group.trajectories
        )


def test_schema_4_still_decodes():
    first, second = decode_groups(SCHEMA_4.read_bytes())
    one, two = first.trajectories
    assert one.routed_experts == RoutedExperts(np.array([[[3, 0]], [[-1, 7]]], np.int16))
    assert two.routed_experts == RoutedExperts(np.array([[[300, 2]]], np.int16))
    assert (two.sampling_mask, two.verdict) == (None, "timeout")
    assert second.trajectories[0].routed_experts is None


def test_schema_4_is_written_as_it_was():
    """If this fails, raise `SCHEMA_VERSION` and store a payload of the new schema beside this one."""
    payload = SCHEMA_4.read_bytes()
    assert parts(encode_groups(decode_groups(payload))) == parts(payload)


def parts(payload: bytes) -> tuple[dict, dict, bytes]:
    """Header, what it says of trajectories (blanks in it are free) and columns."""
    size = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + size])
    told = json.loads(header["__metadata__"].pop("trajectories"))
    return header, told, payload[8 + size :]
