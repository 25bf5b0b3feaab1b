"""Whatever bytes arrive, `decode_groups` answers with groups or with `DataError`."""

import json
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from headway.contracts.codec import SCHEMA_VERSION, decode_groups, encode_groups
from headway.contracts.errors import DataError
from tests.unit.gateway.rollout_builders import make_group

PAYLOAD = encode_groups([make_group("r0", 2), make_group("r1", 1, version=3)])
HEADER_BYTES = 8 + int.from_bytes(PAYLOAD[:8], "little")


def decode_or_refuse(payload: bytes) -> None:
    try:
        decode_groups(payload)
    except DataError as error:
        assert str(error)


@settings(max_examples=400)
@given(st.integers(0, len(PAYLOAD) - 1), st.integers(1, 255))
def test_a_flipped_byte_never_raises_anything_else(position, mask):
    damaged = bytearray(PAYLOAD)
    damaged[position] ^= mask
    decode_or_refuse(bytes(damaged))


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), max_size=4))
def test_overwritten_header_bytes_never_raise_anything_else(writes):
    damaged = bytearray(PAYLOAD)
    for position, value in writes:
        damaged[position] = value
    decode_or_refuse(bytes(damaged))


def test_every_truncation_is_refused():
    for length in range(len(PAYLOAD)):
        with pytest.raises(DataError):
            decode_groups(PAYLOAD[:length])


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x00" * 8)
@example(b"\xff" * 64)
@example(b"PK\x03\x04 a zip archive")
@example(struct.pack("<Q", 20_000) + b"[" * 20_000)
@example(struct.pack("<Q", 2) + b"{}")
@example(struct.pack("<Q", 4) + b"null")
def test_foreign_bytes_are_refused(payload):
    with pytest.raises(DataError):
        decode_groups(payload)


def test_trailing_bytes_are_refused():
    with pytest.raises(DataError):
        decode_groups(PAYLOAD + b"\x00")


def rebuilt(schema_version: object = SCHEMA_VERSION, columns=None, **changes) -> bytes:
    """The same payload with another header or other columns."""
    header = {
        "groups": [["r0", "g-r0", 1]],
        "sample_index": [0],
        "stop_reason": ["stop"],
        **changes,
    }
    tensors = {
        "input_ids": np.array([1, 2], np.int32),
        "loss_mask": np.array([False, True]),
        "logprobs": np.array([0, -1], np.float32),
        "versions": np.array([-1, 0], np.int32),
        "lengths": np.array([2], np.int64),
        "rewards": np.array([1], np.float32),
        **(columns or {}),
    }
    tensors = {name: column for name, column in tensors.items() if column is not None}
    text = header if isinstance(header, str) else json.dumps(header)
    return save(tensors, metadata={"schema_version": str(schema_version), "trajectories": text})


def test_the_rebuilt_payload_is_good_as_it_stands():
    (group,) = decode_groups(rebuilt())
    assert group.rollout_id == "r0"


def test_a_newer_schema_says_what_to_do():
    with pytest.raises(DataError, match=r"schema 5 is newer than 4; update this process"):
        decode_groups(rebuilt(schema_version=5))


@pytest.mark.parametrize("version", ["0", "-1", "one", "1.0", ""])
def test_a_schema_that_never_was_is_refused(version):
    with pytest.raises(DataError):
        decode_groups(rebuilt(schema_version=version))


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": [["r0", "g-r0"]]},
        {"groups": [["r0", "g-r0", "1"]]},
        {"groups": [["r0", "g-r0", 2]]},
        {"groups": [["r0", "g-r0", 2], ["r1", "g-r1", -1]]},
        {"groups": [[0, 0, 1]]},
        {"groups": {"r0": 1}},
        {"groups": 3},
        {"groups": None},
        {"sample_index": []},
        {"sample_index": ["0"]},
        {"sample_index": 0},
        {"stop_reason": ["tired"]},
        {"stop_reason": [["stop"]]},
        {"stop_reason": "stop"},
        {"stop_reason": None},
    ],
    ids=str,
)
def test_an_inconsistent_header_is_refused(changes):
    with pytest.raises(DataError):
        decode_groups(rebuilt(**changes))


@pytest.mark.parametrize(
    "columns",
    [
        {"rewards": None},
        {"rewards": np.array([1.0])},
        {"rewards": np.array([1, 1], np.float32)},
        {"rewards": np.array([[1]], np.float32)},
        {"rewards": np.array([np.nan], np.float32)},
        {"logprobs": np.array([0, np.nan], np.float32)},
        {"logprobs": np.array([0, -1, -1], np.float32)},
        {"logprobs": np.array([0, -1], np.int32)},
        {"lengths": np.array([0], np.int64)},
        {"lengths": np.array([-2], np.int64)},
        {"lengths": np.array([3], np.int64)},
        {"lengths": np.array([2**62], np.int64)},
        {"lengths": np.array([2.0])},
        {"input_ids": None},
    ],
    ids=str,
)
def test_inconsistent_columns_are_refused(columns):
    with pytest.raises(DataError):
        decode_groups(rebuilt(columns=columns))


def test_a_type_that_numpy_has_not_is_refused():
    payload = rebuilt(columns={"rewards": np.array([1, 1], np.float16)})
    assert payload.count(b'"F16"') == 1
    with pytest.raises(DataError):
        decode_groups(payload.replace(b'"F16"', b'"BF16"').replace(b" " * 1, b"", 1))


def test_lengths_that_overflow_are_refused():
    lengths = np.array([2**62, 2**62, 2**62, 2**62 - 2 + 4], np.int64)
    payload = rebuilt(
        columns={"lengths": lengths, "rewards": np.ones(4, np.float32)},
        groups=[["r0", "g", 4]],
        sample_index=[0, 1, 2, 3],
        stop_reason=["stop"] * 4,
    )
    with pytest.raises(DataError):
        decode_groups(payload)


@pytest.mark.parametrize("column", ["rewards", "logprobs"])
def test_a_number_that_is_not_finite_is_refused_with_its_rollout(column):
    tensors = load(PAYLOAD)  # rows 0 and 1 are of r0, row 2 is of r1
    tensors[column][-1] = np.nan
    with pytest.raises(DataError, match=r"not finite, of rollouts \['r1'\]"):
        decode_groups(rebuilt_of(tensors))


def rebuilt_of(tensors: dict[str, np.ndarray]) -> bytes:
    """The payload with other columns."""
    with_metadata = json.loads(PAYLOAD[8:HEADER_BYTES])["__metadata__"]
    return save(tensors, metadata=with_metadata)
