"""Trajectories <-> bytes: safetensors columns behind a JSON header with a schema version.

Columns of all trajectories are concatenated and cut by `lengths`, so a batch costs one copy; what no
trajectory has is left out:
`input_ids` int32, `loss_mask` bool, `logprobs` float32, `versions` int32, `lengths` int64 [N],
`rewards` float32 [N]. Of trajectories with a sampling mask, `mask_counts` int32 holds its counts and
`mask_tokens` int32 its ids, cut by `mask_sizes` of the header; of those with routed experts, `experts`
uint8 holds their bytes, cut by `expert_sizes`. Identifiers, stop reasons, verdicts and
turns are JSON in the header's metadata. Schema 1 had no verdicts, details, turns and branches, schema 2
no sampling masks, and schema 3 no routed experts; they are read still.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt
from pydantic_core import from_json, to_json
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from headway.contracts.errors import DataError
from headway.contracts.routed_experts import PackedExperts, RoutedExperts
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.token_extras import experts_of, masks_of
from headway.contracts.types import StopReason, Trajectory, TrajectoryGroup, Turn, Verdict

SCHEMA_VERSION = 4
MAX_REWARD = float(np.finfo(np.float32).max)
MEDIA_TYPE = "application/vnd.headway.trajectories+safetensors"

_TOKEN_COLUMNS: dict[str, np.dtype[Any]] = {
    "input_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
}
_COLUMNS: dict[str, np.dtype[Any]] = {
    "lengths": np.dtype(np.int64),
    "logprobs": np.dtype(np.float32),
    "rewards": np.dtype(np.float32),
    "input_ids": np.dtype(np.int32),
    "mask_counts": np.dtype(np.int32),
    "mask_tokens": np.dtype(np.int32),
    "versions": np.dtype(np.int32),
    "experts": np.dtype(np.uint8),
    "loss_mask": np.dtype(np.bool_),
}
"""Columns in the order of a payload: the widest first, so that each begins at a multiple of its
width."""
_EXTRAS = frozenset({"mask_counts", "mask_tokens", "experts"})
"""Columns that a payload may leave out."""
_TYPE_NAMES = {
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.float32): "F32",
    np.dtype(np.bool_): "BOOL",
    np.dtype(np.uint8): "U8",
}
"""Names of NumPy's types in safetensors."""
_Turn = tuple[int, int, StopReason, float | None, dict[str, Any]]
"""The fields of a `Turn`, in its order."""


class _Header(BaseModel):
    """Everything that is not a column; [N] counts trajectories."""

    model_config = ConfigDict(strict=True)

    groups: list[tuple[str, str, NonNegativeInt]]  # rollout_id, group_id, trajectories
    sample_index: list[int]  # [N]
    stop_reason: list[StopReason]  # [N]
    verdict: list[Verdict] | None = None  # [N]
    details: list[dict[str, Any]] | None = None  # [N]
    turns: list[list[_Turn]] | None = None  # [N]
    branch: list[NonNegativeInt] | None = None  # [N]
    mask_sizes: list[NonNegativeInt | None] | None = None  # [N] ids; None of one without a mask
    expert_sizes: list[tuple[int, int, int, int] | None] | None = None
    """[N] tokens, layers, experts of each, and bytes of each; None of one without."""

    def sizes(self) -> set[int]:
        """Lengths of the columns that are there: one, if the header is whole."""
        columns = (
            self.sample_index,
            self.stop_reason,
            self.verdict,
            self.details,
            self.turns,
            self.branch,
            self.mask_sizes,
            self.expert_sizes,
        )
        return {len(column) for column in columns if column is not None}

    def notes(self, row: int, num_tokens: int) -> dict[str, Any]:
        """Return the fields of one trajectory that are not columns."""
        if (
            self.verdict is None
            or self.details is None
            or self.turns is None
            or self.branch is None
        ):
            return {}
        turns = tuple(Turn(*turn) for turn in self.turns[row])
        if any(not 0 <= turn.start <= turn.end <= num_tokens for turn in turns):
            raise DataError(f"trajectory payload has turns beyond {num_tokens} tokens: {turns}")
        return {
            "verdict": self.verdict[row],
            "details": self.details[row],
            "turns": turns,
            "branch": self.branch[row],
        }


def encode_groups(groups: Sequence[TrajectoryGroup]) -> bytes:
    """Encode whole groups; `decode_groups` is the inverse, bit for bit.

    Raises:
        DataError: a column is shorter than its trajectory or of another type, or a logprob or reward
            is not finite.
    """
    rows = [trajectory for group in groups for trajectory in group.trajectories]
    for row in rows:
        _check_row(row)
    columns = {
        name: b"".join([getattr(row, name).tobytes() for row in rows]) for name in _TOKEN_COLUMNS
    }
    columns["lengths"] = pack(f"<{len(rows)}q", *[row.num_tokens for row in rows])
    columns["rewards"] = pack(f"<{len(rows)}f", *[row.reward for row in rows])
    header = {
        "groups": [[group.rollout_id, group.group_id, len(group.trajectories)] for group in groups],
        "sample_index": [row.sample_index for row in rows],
        "stop_reason": [row.stop_reason for row in rows],
        "verdict": [row.verdict for row in rows],
        "details": [row.details for row in rows],
        "turns": [[_turn_fields(turn) for turn in row.turns] for row in rows],
        "branch": [row.branch for row in rows],
    }
    if any(row.sampling_mask is not None for row in rows):
        masks = [row.sampling_mask for row in rows]
        there = [mask for mask in masks if mask is not None]
        columns["mask_counts"] = b"".join([mask.counts.tobytes() for mask in there])
        columns["mask_tokens"] = b"".join([mask.tokens.tobytes() for mask in there])
        header["mask_sizes"] = [None if mask is None else len(mask.tokens) for mask in masks]
    if any(row.routed_experts is not None for row in rows):
        experts = [row.routed_experts for row in rows]
        packed = [None if each is None else each.pack() for each in experts]
        columns["experts"] = b"".join([each.experts for each in packed if each is not None])
        header["expert_sizes"] = [None if each is None else _sizes_of(each) for each in packed]
    return _save(columns, header)


def join_payloads(payloads: Sequence[bytes]) -> bytes:
    """One payload with the groups of several, in order; of ours, so only their headers are checked.

    Raises:
        DataError: one of them is no payload.
    """
    if len(payloads) == 1:
        return payloads[0]
    parts = [_open(payload) for payload in payloads]
    if any(part.schema < SCHEMA_VERSION for part in parts):
        return encode_groups([group for payload in payloads for group in decode_groups(payload)])
    try:
        there = [name for name in _COLUMNS if any(name in part.places for part in parts)]
        columns = {name: b"".join([part.column(name) for part in parts]) for name in there}
        headers = [from_json(part.header) for part in parts]
        header = {
            name: [row for one in headers for row in one.get(name) or _none_of(one)]
            for name in _Header.model_fields
            if any(one.get(name) is not None for one in headers)
        }
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"one of {len(payloads)} payloads cannot be joined: {error}") from error
    return _save(columns, header)


def decode_groups(payload: bytes) -> tuple[TrajectoryGroup, ...]:
    """Decode what `encode_groups` wrote, checking every length and type.

    Raises:
        DataError: not such a payload, of a schema this release cannot read, or holding a logprob or
            reward that is not finite.
    """
    header = _read_header(payload)
    columns = _load_columns(payload)
    lengths = _column(columns, "lengths", _COLUMNS["lengths"])
    rewards = _column(columns, "rewards", _COLUMNS["rewards"])
    num_rows, num_tokens = len(lengths), sum(lengths.tolist())  # exact: no int64 to overflow
    token_columns = {name: _column(columns, name, dtype) for name, dtype in _TOKEN_COLUMNS.items()}
    sizes = {name: len(column) for name, column in token_columns.items()}
    group_sizes = [size for _, _, size in header.groups]
    if (
        (num_rows and int(lengths.min()) < 1)
        or set(sizes.values()) != {num_tokens}
        or {len(rewards), sum(group_sizes)} | header.sizes() != {num_rows}
    ):
        raise DataError(
            f"trajectory payload is inconsistent: {num_rows} lengths over {num_tokens} tokens, "
            f"columns {sizes}, groups {group_sizes}"
        )
    if not (np.isfinite(token_columns["logprobs"]).all() and np.isfinite(rewards).all()):
        raise DataError(
            "trajectory payload holds a logprob or reward that is not finite, of rollouts "
            f"{_not_finite(header, lengths, rewards, token_columns['logprobs'])}"
        )
    masks = _masks(columns, header, lengths.tolist())
    experts = _experts(columns, header, lengths.tolist())
    ends = np.cumsum(lengths)
    groups, row = [], 0
    for rollout_id, group_id, size in header.groups:
        rows = []
        for index in range(row, row + size):
            cut = slice(int(ends[index] - lengths[index]), int(ends[index]))
            rows.append(
                Trajectory(
                    rollout_id=rollout_id,
                    group_id=group_id,
                    sample_index=header.sample_index[index],
                    reward=float(rewards[index]),
                    stop_reason=header.stop_reason[index],
                    input_ids=token_columns["input_ids"][cut],
                    loss_mask=token_columns["loss_mask"][cut],
                    logprobs=token_columns["logprobs"][cut],
                    versions=token_columns["versions"][cut],
                    sampling_mask=masks[index],
                    routed_experts=experts[index],
                    **header.notes(index, int(lengths[index])),
                )
            )
        groups.append(TrajectoryGroup(rollout_id, group_id, tuple(rows)))
        row += size
    return tuple(groups)


def _masks(
    columns: dict[str, NDArray[Any]], header: _Header, lengths: Sequence[int]
) -> list[SamplingMask | None]:
    if header.mask_sizes is None:
        return [None] * len(lengths)
    names = ("mask_counts", "mask_tokens")
    counts, tokens = (_column(columns, name, _COLUMNS[name]) for name in names)
    return masks_of(counts, tokens, header.mask_sizes, lengths)


def _experts(
    columns: dict[str, NDArray[Any]], header: _Header, lengths: Sequence[int]
) -> list[RoutedExperts | None]:
    if header.expert_sizes is None:
        return [None] * len(lengths)
    content = _column(columns, "experts", _COLUMNS["experts"]).tobytes()
    return experts_of(content, header.expert_sizes, lengths)


def _sizes_of(packed: PackedExperts) -> tuple[int, int, int, int]:
    token_bytes = packed.num_layers * packed.top_k * packed.width
    return len(packed.experts) // token_bytes, packed.num_layers, packed.top_k, packed.width


def _none_of(header: Mapping[str, Any]) -> list[None]:
    """A field that was left out."""
    return [None] * len(header["sample_index"])


def _turn_fields(turn: Turn) -> list[Any]:
    return [turn.start, turn.end, turn.stop_reason, turn.reward, turn.note]


def _not_finite(
    header: _Header, lengths: NDArray[Any], rewards: NDArray[Any], logprobs: NDArray[Any]
) -> list[str]:
    """The rollouts of such rows."""
    starts = np.cumsum(lengths) - lengths
    are_wrong = ~np.isfinite(rewards) | ~np.logical_and.reduceat(np.isfinite(logprobs), starts)
    ids = np.repeat([name for name, _, _ in header.groups], [size for *_, size in header.groups])
    return sorted(set(ids[are_wrong].tolist()))


def _check_row(row: Trajectory) -> None:
    shape = (row.num_tokens,)
    for name, wanted in _TOKEN_COLUMNS.items():
        column = getattr(row, name)
        if column.shape != shape or shape == (0,):
            sizes = {name: list(getattr(row, name).shape) for name in _TOKEN_COLUMNS}
            raise DataError(
                f"trajectory {row.trajectory_id} has columns of unequal length: {sizes}"
            )
        if column.dtype != wanted:
            raise DataError(
                f"trajectory {row.trajectory_id} has {name} of {column.dtype}; {wanted} is wanted"
            )
    mask = row.sampling_mask
    if mask is not None and (
        len(mask) != row.num_tokens or int(mask.counts.sum(dtype=np.int64)) != len(mask.tokens)
    ):
        raise DataError(
            f"trajectory {row.trajectory_id} of {row.num_tokens} tokens has a sampling mask of "
            f"{len(mask)} positions, with {len(mask.tokens)} tokens where {mask.counts.sum()} are counted"
        )
    if not (np.isfinite(row.logprobs).all() and abs(row.reward) <= MAX_REWARD):
        raise DataError(
            f"trajectory {row.trajectory_id} holds a logprob or reward that is not finite as float32 "
            f"(reward={row.reward}, versions {set(row.versions.tolist())})"
        )


@dataclass(frozen=True, slots=True)
class _OpenPayload:
    """A payload that was opened, and not yet read."""

    payload: bytes
    schema: int
    header: str
    places: Mapping[str, Any]
    """Safetensors' entry for each column."""
    start: int
    """Offset of the columns, in bytes."""

    def column(self, name: str) -> bytes:
        """The bytes of one column; none of one that was left out."""
        if name in _EXTRAS and name not in self.places:
            return b""
        begin, end = self.places[name]["data_offsets"]
        return self.payload[self.start + begin : self.start + end]


def _open(payload: bytes) -> _OpenPayload:
    try:
        start = 8 + int.from_bytes(payload[:8], "little")
        places = from_json(payload[8:start])
        metadata = places["__metadata__"]
        schema = int(metadata["schema_version"])
        if schema > SCHEMA_VERSION:
            raise DataError(
                f"trajectory schema {schema} is newer than {SCHEMA_VERSION}; update this process"
            )
        if schema < 1:
            raise ValueError(f"schema {schema} never was")
        return _OpenPayload(payload, schema, metadata["trajectories"], places, start)
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(payload, error) from error


def _read_header(payload: bytes) -> _Header:
    part = _open(payload)
    try:
        return _Header.model_validate_json(part.header)
    except ValueError as error:
        raise _unreadable(payload, error) from error


def _unreadable(payload: bytes, error: Exception) -> DataError:
    return DataError(f"{len(payload)} bytes are not a trajectory payload: {error}")


def _save(columns: Mapping[str, bytes], header: Mapping[str, Any]) -> bytes:
    """Write what `safetensors.numpy.save` would, which takes six times as long for columns as short
    as these."""
    metadata = {"schema_version": str(SCHEMA_VERSION), "trajectories": to_json(header).decode()}
    places: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    names = [name for name in _COLUMNS if name in columns]
    for name in names:
        dtype = _COLUMNS[name]
        begin, end = end, end + len(columns[name])
        shape, offsets = [(end - begin) // dtype.itemsize], [begin, end]
        places[name] = {"dtype": _TYPE_NAMES[dtype], "shape": shape, "data_offsets": offsets}
    head = to_json(places)
    head += b" " * (-len(head) % 8)
    return b"".join([len(head).to_bytes(8, "little"), head, *[columns[name] for name in names]])


def _load_columns(payload: bytes) -> dict[str, NDArray[Any]]:
    try:
        columns: dict[str, NDArray[Any]] = load_tensors(payload)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:  # KeyError: unknown dtype
        raise DataError(
            f"trajectory payload of {len(payload)} bytes is damaged: {error}"
        ) from error
    return columns


def _column(columns: dict[str, NDArray[Any]], name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    column = columns.get(name)
    if column is None or column.dtype != dtype or column.ndim != 1:
        seen = "nothing" if column is None else f"{column.dtype}{list(column.shape)}"
        raise DataError(f"trajectory column {name!r}: {dtype}[n] wanted, {seen} found")
    return column
