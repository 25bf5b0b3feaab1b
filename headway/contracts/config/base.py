"""The base of every configuration section and of every record that enters from outside."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_COUNT = 2**53
"""Whole numbers below are the same to every reader of JSON."""


class Config(BaseModel):
    """Frozen; an unknown key is an error, as is a number that is not finite; the string under a field is
    its documentation."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


def _check_finite(tree: dict[str, Any]) -> dict[str, Any]:
    """What `1e400` reads as has no form in JSON, and would be written as another value."""
    left: list[Any] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            left.extend(node.values())
        elif isinstance(node, list | tuple):
            left.extend(node)
        elif isinstance(node, float) and not math.isfinite(node):
            raise ValueError(f"holds the number {node}, which JSON cannot write")
    return tree


JsonObject = Annotated[dict[str, Any], AfterValidator(_check_finite)]
"""An object whose inside belongs to somebody else."""


class PartConfig(Config):
    """A registered part by name, with its arguments."""

    name: str = Field(min_length=1, max_length=128)
    """Registered name of the part."""
    args: JsonObject = {}
    """Keyword arguments of the part, checked against its own schema."""
