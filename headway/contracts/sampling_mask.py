"""Sampling masks: the tokens that `top_k`, `top_p` and `min_p` left at each position.

Ids are stored, not thresholds: a trainer's logits differ a little from the server's, and would put tokens
near a threshold on its other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

MAX_MASK_TOKENS = 1 << 22
"""Maximum number of ids in the mask of one response (16 MiB)."""
MASK_DTYPE = np.dtype("<i4")


class PackedMask(BaseModel):
    """A sampling mask in JSON: both arrays as little-endian int32 in base64 (URL-safe)."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_bytes="base64",
        val_json_bytes="base64",
    )

    counts: bytes
    """Number of tokens left at each position; 0 where nothing was cut."""
    tokens: bytes
    """Their ids, position by position, ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """Tokens that could be drawn at each of T positions."""

    counts: NDArray[
        np.int32
    ]  # [T] tokens left; 0 where nothing was cut, and every token could be drawn
    tokens: NDArray[np.int32]  # [sum of counts] their ids, position by position, ascending

    def __len__(self) -> int:
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingMask) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__slots__
        )

    __hash__ = None  # type: ignore[assignment] # arrays have none

    @staticmethod
    def whole(length: int) -> SamplingMask:
        """A mask of positions where nothing was cut."""
        return SamplingMask(np.zeros(length, np.int32), np.empty(0, np.int32))

    @staticmethod
    def of(sets: Sequence[NDArray[np.int32]]) -> SamplingMask:
        """A mask of the ids left at each position; an empty set where nothing was cut."""
        counts = np.array([len(ids) for ids in sets], np.int32)
        return SamplingMask(counts, np.concatenate([*sets, np.empty(0, np.int32)]))

    @staticmethod
    def join(parts: Sequence[SamplingMask]) -> SamplingMask:
        """The masks of sequences that stand one behind the other."""
        return SamplingMask(
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.tokens for part in parts]),
        )

    def first(self, length: int) -> SamplingMask:
        """The mask of the first positions."""
        counts = self.counts[:length]
        return SamplingMask(counts, self.tokens[: int(counts.sum())])

    def problem(self, sampled: Sequence[int] | NDArray[np.int32]) -> str | None:
        """Return why this cannot be the mask of these tokens [T]; None if it may be."""
        if len(self) != len(sampled):
            return f"a sampling mask of {len(self)} positions for {len(sampled)} tokens"
        if len(self.counts) and int(self.counts.min()) < 0:
            return f"a sampling mask with {self.counts.min()} tokens at a position"
        if int(self.counts.sum(dtype=np.int64)) != len(self.tokens):
            return (
                f"a sampling mask of {len(self.tokens)} tokens whose counts sum to another number"
            )
        positions = np.repeat(np.arange(len(self)), self.counts)
        hits = np.bincount(
            positions[self.tokens == np.asarray(sampled, np.int64)[positions]], minlength=len(self)
        )
        are_wrong = hits != (self.counts > 0)
        if are_wrong.any():
            at = int(are_wrong.argmax())
            return f"a sampling mask without the token {sampled[at]} that was drawn at {at}"
        return None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        packed = handler.generate_schema(PackedMask)
        unpacked = core_schema.no_info_after_validator_function(_unpack, packed)
        return core_schema.json_or_python_schema(
            json_schema=unpacked,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), unpacked]),
            serialization=core_schema.plain_serializer_function_ser_schema(
                _pack, return_schema=packed
            ),
        )


def _pack(mask: SamplingMask) -> PackedMask:
    return PackedMask(
        counts=mask.counts.astype(MASK_DTYPE).tobytes(),
        tokens=mask.tokens.astype(MASK_DTYPE).tobytes(),
    )


def _unpack(packed: PackedMask) -> SamplingMask:
    if len(packed.counts) % MASK_DTYPE.itemsize or len(packed.tokens) % MASK_DTYPE.itemsize:
        raise ValueError("the arrays of a sampling mask are int32: their bytes come in fours")
    counts, tokens = (
        np.frombuffer(part, MASK_DTYPE).astype(np.int32, copy=False)
        for part in (packed.counts, packed.tokens)
    )
    return SamplingMask(counts, tokens)
