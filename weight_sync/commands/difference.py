"""`headway weights diff`: what changed between two versions."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from headway.contracts.types import PolicyVersion
from weight_sync.commands.catalog import Catalog
from weight_sync.commands.output import print_json, print_line, print_table
from weight_sync.commands.tensor_values import VersionTensors

PART = 1 << 22
"""Elements compared at once, in float64."""
COLUMNS = ("tensor", "shape", "changed", "of it", "max |delta|", "relative L2")
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor that both versions have, in one shape and type."""

    name: str
    shape: tuple[int, ...]
    num_changed: int
    """Elements with other bits."""
    num_elements: int
    max_abs: float | None
    """Largest change of an element; None if one is not finite."""
    relative_l2: float | None
    """Norm of the change over norm of the older; None if that is zero, or one is not finite."""


def print_difference(
    root: str, old: PolicyVersion, new: PolicyVersion, top: int | None, as_json: bool
) -> None:
    """Compare two versions of a root."""
    catalog = Catalog(root)
    before, after = VersionTensors(catalog, old), VersionTensors(catalog, new)
    had, has = before.kinds(), after.kinds()
    common = [name for name in has if had.get(name) == has[name]]
    changes = sorted(
        (_compare(name, before.read(name), after.read(name)) for name in common), key=_order
    )
    shown = changes if top is None else changes[:top]
    added, gone = sorted(has.keys() - had.keys()), sorted(had.keys() - has.keys())
    other = sorted(name for name in had.keys() & has.keys() if had[name] != has[name])
    if as_json:
        print_json(
            {
                "from": old,
                "to": new,
                "num_changed": sum(change.num_changed for change in changes),
                "num_elements": sum(change.num_elements for change in changes),
                "tensors": [asdict(change) for change in shown],
                "added": {name: has[name] for name in added},
                "gone": {name: had[name] for name in gone},
                "reshaped": {name: [had[name], has[name]] for name in other},
            }
        )
        return
    print_table(COLUMNS, [_cells(change) for change in shown], left=2)
    for name in added:
        print_line(f"added: {name} {_kind(has[name])}")
    for name in gone:
        print_line(f"gone: {name} {_kind(had[name])}")
    for name in other:
        print_line(f"other shape or type: {name} {_kind(had[name])} -> {_kind(has[name])}")
    print_line(_summary(old, new, changes, len(shown)))


def _compare(name: str, before: torch.Tensor, after: torch.Tensor) -> TensorChange:
    old, new = before.reshape(-1), after.reshape(-1)
    bits = _BITS[old.itemsize]
    num_changed, largest, change, norm = 0, 0.0, 0.0, 0.0
    for start in range(0, old.numel(), PART):
        left, right = old[start : start + PART], new[start : start + PART]
        num_changed += int((left.view(bits) != right.view(bits)).sum())
        exact = left.double()
        delta = right.double() - exact
        highest = float(delta.abs().max())
        largest = highest if math.isnan(highest) else max(largest, highest)
        change += float(delta.square().sum())
        norm += float(exact.square().sum())
        if math.isnan(largest):
            break
    return TensorChange(
        name=name,
        shape=tuple(before.shape),
        num_changed=num_changed,
        num_elements=old.numel(),
        max_abs=largest if math.isfinite(largest) else None,
        relative_l2=_ratio(change, norm),
    )


def _ratio(change: float, norm: float) -> float | None:
    if change == 0:
        return 0.0
    ratio = math.sqrt(change / norm) if norm > 0 and math.isfinite(change + norm) else math.inf
    return ratio if math.isfinite(ratio) else None


def _order(change: TensorChange) -> tuple[float, int, str]:
    size = math.inf if change.relative_l2 is None else change.relative_l2
    return -size, -change.num_changed, change.name


def _cells(change: TensorChange) -> list[str]:
    share = change.num_changed / change.num_elements if change.num_elements else 0.0
    return [
        change.name,
        "x".join(map(str, change.shape)) or "scalar",
        f"{change.num_changed:,}",
        f"{share:.2%}",
        "not finite" if change.max_abs is None else f"{change.max_abs:.3g}",
        "-" if change.relative_l2 is None else f"{change.relative_l2:.3g}",
    ]


def _kind(kind: tuple[tuple[int, ...], str]) -> str:
    return f"{kind[1]} {list(kind[0])}"


def _summary(
    old: PolicyVersion, new: PolicyVersion, changes: list[TensorChange], shown: int
) -> str:
    changed = sum(change.num_changed for change in changes)
    elements = sum(change.num_elements for change in changes)
    touched = sum(change.num_changed > 0 for change in changes)
    share = changed / elements if elements else 0.0
    text = (
        f"{old} -> {new}: {touched} of {len(changes)} tensors changed, in {changed:,} of "
        f"{elements:,} elements ({share:.2%})"
    )
    return text if shown == len(changes) else f"{text}; {shown} are shown"
