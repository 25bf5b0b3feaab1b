"""Routed experts: the experts that computed each token of a sequence, in each layer of a mixture.

A trainer whose routers saw slightly other numbers would choose others for some tokens, and give those
tokens other logprobs. It replays the choice instead (arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from headway.contracts.errors import BackendError

UNKNOWN = -1
"""In place of an expert whose choice was not recorded."""
MAX_EXPERT_BYTES = 1 << 28
"""Maximum size of the experts of one response."""

_ID: dict[int, np.dtype[np.unsignedinteger[Any]]] = {1: np.dtype("u1"), 2: np.dtype("<u2")}


class PackedExperts(BaseModel):
    """Routed experts in JSON: the ids in base64 (URL-safe), token by token, layer by layer."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_bytes="base64",
        val_json_bytes="base64",
    )

    num_layers: int = Field(ge=1, le=4096)
    """Layers with experts."""
    top_k: int = Field(ge=1, le=1024)
    """Experts of a token in a layer."""
    width: int = Field(ge=1, le=2)
    """Bytes of an id: 1 (unsigned), or 2 (little-endian). With all bits set it is unknown."""
    experts: bytes
    """The ids."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """Experts of the first n tokens of a sequence."""

    experts: NDArray[np.int16]  # [n, L, K] ids, or `UNKNOWN`

    def __len__(self) -> int:
        return len(self.experts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoutedExperts) and np.array_equal(self.experts, other.experts)

    __hash__ = None  # type: ignore[assignment] # arrays have none

    @property
    def shape(self) -> tuple[int, int]:
        """Return (L, K): layers with experts, and experts of a token in each."""
        _, num_layers, top_k = self.experts.shape
        return num_layers, top_k

    def first(self, length: int) -> RoutedExperts:
        """Return those of the first tokens."""
        return RoutedExperts(self.experts[:length])

    def then(self, later: RoutedExperts) -> RoutedExperts:
        """Return these, and behind them those of a later request that began with these tokens.

        Raises:
            BackendError: they are of different models.
        """
        if later.shape != self.shape:
            raise BackendError(
                f"routed experts came from models with {self.shape} and {later.shape} layers and experts "
                "per token; serve one model"
            )
        return RoutedExperts(np.concatenate([self.experts, later.experts[len(self) :]]))

    def narrow(self) -> NDArray[np.unsignedinteger[Any]]:
        """Return the ids [n, L, K], of one byte where that is enough; `UNKNOWN` has all bits set."""
        return self.experts.astype(_ID[1 if self.experts.max(initial=0) < 0xFF else 2])

    @staticmethod
    def widen(ids: NDArray[np.unsignedinteger[Any]]) -> RoutedExperts:
        """Return what `narrow` narrowed."""
        experts = ids.astype(np.int16)
        if ids.itemsize == 1:
            experts[ids == 0xFF] = UNKNOWN
        return RoutedExperts(experts)

    def pack(self) -> PackedExperts:
        """Return them in the form of JSON."""
        ids = self.narrow()
        _, num_layers, top_k = ids.shape
        return PackedExperts(
            num_layers=num_layers, top_k=top_k, width=ids.itemsize, experts=ids.tobytes()
        )

    @staticmethod
    def unpack(packed: PackedExperts) -> RoutedExperts:
        """Return what `pack` packed.

        Raises:
            ValueError: the ids are not of whole tokens.
        """
        token_bytes = packed.num_layers * packed.top_k * packed.width
        if len(packed.experts) % token_bytes:
            raise ValueError(
                f"{len(packed.experts)} bytes of routed experts are not of whole tokens: each has "
                f"{packed.num_layers} layers x {packed.top_k} experts x {packed.width} bytes"
            )
        ids = np.frombuffer(packed.experts, _ID[packed.width])
        return RoutedExperts.widen(ids.reshape(-1, packed.num_layers, packed.top_k))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        packed = handler.generate_schema(PackedExperts)
        unpacked = core_schema.no_info_after_validator_function(cls.unpack, packed)
        return core_schema.json_or_python_schema(
            json_schema=unpacked,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), unpacked]),
            serialization=core_schema.plain_serializer_function_ser_schema(
                cls.pack, return_schema=packed
            ),
        )


def join_experts(parts: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
    """Return the experts of one sequence from responses to ever longer prompts of it, in their order.

    Raises:
        BackendError: they are of different models.
    """
    joined: RoutedExperts | None = None
    for part in parts:
        if part is not None:
            joined = part if joined is None else joined.then(part)
    return joined
