"""Batches between a driver and its workers: rows of tensors and objects, and metadata.

Nothing here changes a batch in place: every method returns a new one, which may share storage with the
old one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.contracts.errors import DataError

METRICS = "metrics"
"""Key in `meta` whose values `concat` gathers: name -> one number, or a list of them."""


@dataclass(frozen=True, slots=True, eq=False)
class DataProto:
    """N rows, each with an entry in every column."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # each [N, ...]
    objects: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Each [N], of anything that can be pickled."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Values for all rows."""
    num_padding: int = 0
    """Last rows that are copies, there to fill ranks up: they are in no loss and no result."""

    def __post_init__(self) -> None:
        sizes = {name: len(column) for name, column in self.tensors.items()}
        sizes |= {name: len(column) for name, column in self.objects.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"columns have {sizes} rows; wanted is one number for all")
        twice = self.tensors.keys() & self.objects.keys()
        if twice:
            raise DataError(f"columns {sorted(twice)} are tensors and objects; rename one of each")

    @staticmethod
    def of(meta: Mapping[str, Any] | None = None, **columns: Any) -> DataProto:
        """Build a batch from columns: tensors stay, any other sequence becomes an array of objects."""
        tensors = {name: c for name, c in columns.items() if isinstance(c, Tensor)}
        objects = {name: _objects(c) for name, c in columns.items() if name not in tensors}
        return DataProto(tensors, objects, dict(meta or {}))

    def __len__(self) -> int:
        """N, padding included; 0 if there are no columns."""
        columns: list[Any] = [*self.tensors.values(), *self.objects.values()]
        return len(columns[0]) if columns else 0

    def __getitem__(self, name: str) -> Any:
        """A column.

        Raises:
            DataError: there is none of this name.
        """
        if name in self.tensors:
            return self.tensors[name]
        if name in self.objects:
            return self.objects[name]
        raise DataError(f"there is no column {name!r}; the batch has {sorted(self.columns)}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled are a batch's own rows: torch would send all that a view is a part of."""
        tensors = {name: _compact(tensor) for name, tensor in self.tensors.items()}
        return DataProto, (tensors, dict(self.objects), dict(self.meta), self.num_padding)

    @property
    def columns(self) -> set[str]:
        """Names of tensors and objects."""
        return self.tensors.keys() | self.objects.keys()

    def with_columns(self, **columns: Any) -> DataProto:
        """Add or replace columns."""
        new = DataProto.of(**columns)
        tensors = {n: c for n, c in self.tensors.items() if n not in new.objects} | {**new.tensors}
        objects = {n: c for n, c in self.objects.items() if n not in new.tensors} | {**new.objects}
        return replace(self, tensors=tensors, objects=objects)

    def with_meta(self, **notes: Any) -> DataProto:
        """Add or replace values of `meta`."""
        return replace(self, meta={**self.meta, **notes})

    def select(self, names: Sequence[str], meta: Sequence[str] | None = None) -> DataProto:
        """These columns alone, and these notes (None: all of them)."""
        for name in names:
            self[name]
        tensors = {name: self.tensors[name] for name in names if name in self.tensors}
        objects = {name: self.objects[name] for name in names if name in self.objects}
        notes = self.meta if meta is None else {name: self.meta[name] for name in meta}
        return DataProto(tensors, objects, notes, self.num_padding)

    def union(self, other: DataProto) -> DataProto:
        """All columns and notes of both.

        Raises:
            DataError: their numbers of rows differ, or a name has two values.
        """
        if self.columns and other.columns and len(self) != len(other):
            raise DataError(f"{len(self)} rows have no union with {len(other)}")
        if self.num_padding != other.num_padding:
            raise DataError(
                f"{self.num_padding} padding rows have no union with {other.num_padding}; unpad both"
            )
        for name in self.columns & other.columns:
            if not _are_equal(self[name], other[name]):
                raise DataError(f"column {name!r} differs between the two; select or rename one")
        meta = _merged([self.meta, other.meta])
        return DataProto(
            {**self.tensors, **other.tensors},
            {**self.objects, **other.objects},
            meta,
            self.num_padding,
        )

    def rows(self, indices: Sequence[int] | Tensor) -> DataProto:
        """The rows at `indices`, in that order, as often as they are named."""
        self._refuse_padding()
        at = torch.as_tensor(indices, dtype=torch.int64)
        wrong = at[(at < 0) | (at >= len(self))]
        if len(wrong):
            raise DataError(f"there is no row {int(wrong[0])} among {len(self)}")
        return self._taken(at, 0)

    def repeat(self, times: int, interleave: bool = True) -> DataProto:
        """Each row `times` times: one after the other (aabb), or the batch again and again (abab)."""
        if times < 1:
            raise DataError(f"times={times}, wanted at least 1")
        at = torch.arange(len(self))
        return self.rows(at.repeat_interleave(times) if interleave else at.repeat(times))

    def split(self, size: int) -> list[DataProto]:
        """Parts of `size` rows, the last one may have fewer."""
        if size < 1:
            raise DataError(f"size={size}, wanted at least 1 row")
        starts = range(0, len(self), size)
        return [self._span(start, min(start + size, len(self))) for start in starts]

    def chunk(self, count: int) -> list[DataProto]:
        """Split into `count` equal parts.

        Raises:
            DataError: the rows cannot be split so.
        """
        if count < 1 or len(self) == 0 or len(self) % count:
            raise DataError(
                f"{len(self)} rows cannot be split into {count} equal parts; pad_to({count}), or turn "
                "the group's auto_pad on"
            )
        return self.split(len(self) // count)

    def pad_to(self, multiple: int) -> DataProto:
        """Append copies of the last row up to a multiple."""
        self._refuse_padding()
        missing = -len(self) % multiple
        if len(self) == 0:
            raise DataError("a batch of no rows has none to pad with")
        if missing == 0:
            return self
        at = torch.cat([torch.arange(len(self)), torch.full((missing,), len(self) - 1)])
        return self._taken(at, missing)

    def unpad(self) -> DataProto:
        """Remove the padding rows."""
        end = len(self) - self.num_padding
        return replace(self._span(0, end), num_padding=0) if self.num_padding else self

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """The rows of all parts, one after the other; `metrics` of all, in lists.

        Raises:
            DataError: of other columns, of notes that differ, or with padding between rows.
        """
        if not parts:
            raise DataError("nothing to put together; wanted is at least one batch")
        first = parts[0]
        for part in parts[1:]:
            if (
                part.tensors.keys() != first.tensors.keys()
                or part.objects.keys() != first.objects.keys()
            ):
                raise DataError(
                    f"columns {sorted(part.columns)} cannot follow {sorted(first.columns)}"
                )
        padding = 0
        for part in parts:
            if padding and part.num_padding < len(part):
                raise DataError("padding rows stand before others; unpad the parts first")
            padding += part.num_padding
        tensors = {name: torch.cat([p.tensors[name] for p in parts]) for name in first.tensors}
        objects = {name: np.concatenate([p.objects[name] for p in parts]) for name in first.objects}
        return DataProto(tensors, objects, _merged([part.meta for part in parts]), padding)

    def minibatches(
        self, size: int, epochs: int = 1, seed: int | None = None
    ) -> Iterator[DataProto]:
        """Parts of `size` rows, the last one may have fewer; all rows once per epoch.

        Args:
            seed: of the order, drawn again for each epoch; None keeps the order of the rows.
        """
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            if generator is None:
                yield from self.split(size)
            else:
                yield from self.rows(torch.randperm(len(self), generator=generator)).split(size)

    def _span(self, start: int, end: int) -> DataProto:
        """Rows from `start` to `end`, which share the storage of these."""
        tensors = {name: column[start:end] for name, column in self.tensors.items()}
        objects = {name: column[start:end] for name, column in self.objects.items()}
        first_padding = len(self) - self.num_padding
        return DataProto(tensors, objects, self.meta, max(0, end - max(start, first_padding)))

    def _taken(self, at: Tensor, num_padding: int) -> DataProto:
        tensors = {name: column[at.to(column.device)] for name, column in self.tensors.items()}
        objects = {name: column[at.numpy()] for name, column in self.objects.items()}
        return DataProto(tensors, objects, self.meta, num_padding)

    def _refuse_padding(self) -> None:
        if self.num_padding:
            raise DataError(f"the last {self.num_padding} rows are padding; unpad first")


def _objects(values: Sequence[Any]) -> NDArray[Any]:
    """[N], also of values that are sequences themselves."""
    array = np.empty(len(values), dtype=object)
    array[:] = list(values) if not isinstance(values, np.ndarray) else values
    return array


def _compact(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if is_whole else tensor.clone()


def _merged(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the parts' `meta`; a key must have one value, except for the metrics, which are gathered."""
    merged: dict[str, Any] = {}
    for meta in metas:
        for name, value in meta.items():
            if name != METRICS and name in merged and not _are_equal(merged[name], value):
                raise DataError(f"meta[{name!r}] differs: {merged[name]!r} and {value!r}")
            merged[name] = value
    gathered: dict[str, list[Any]] = {}
    holders = [meta[METRICS] for meta in metas if METRICS in meta]
    for metrics in holders:
        for name, value in metrics.items():
            gathered.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    if len(holders) > 1:
        merged[METRICS] = gathered
    return merged


def _are_equal(one: Any, other: Any) -> bool:
    """Compare bit by bit; a NaN is equal to itself."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        is_alike = (
            isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype == other.dtype
        )
        return (
            is_alike
            and one.shape == other.shape
            and bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
        )
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        pairs = zip(one.tolist(), other.tolist(), strict=True)
        return one.shape == other.shape and all(_are_equal(a, b) for a, b in pairs)
    return bool(one == other)
