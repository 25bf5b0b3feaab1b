"""The base of every configuration section and of every record that enters from outside."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
)
from pydantic_core import CoreSchema

MAX_COUNT = 2**53
"""Whole numbers below are the same to every reader of JSON."""
MAX_VALUES = 1 << 18
"""Maximum number of values in a `JsonObject`: this many are checked in 20 ms."""
Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:@+-]{1,128}$")]
"""Names a rollout, a group, a consumer, a server."""
LogFormat = Literal["auto", "text", "json"]
SEQUENCES = ("list", "tuple", "set", "frozenset")


def _fail_fast(schema: Any) -> None:
    """Let every sequence within a schema end at its first error."""
    if isinstance(schema, dict):
        if schema.get("type") in SEQUENCES:
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list):
        for part in schema:
            _fail_fast(part)


class Record(BaseModel):
    """Only the first wrong item of each sequence is reported: every error costs its reader 2 µs."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


class Config(Record):
    """Frozen; an unknown key is an error, as is a number that is not finite; the string under a field is
    its documentation."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @classmethod
    def from_response(cls, content: bytes) -> Self:
        """Read what another process answered; unknown keys are ignored at every depth, since that
        process may be newer. Requests and files are read by `model_validate`, which refuses them.

        Raises:
            ValidationError: it is something else.
        """
        return cls.model_validate_json(content, extra="ignore")

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Itself: nobody changes it. Every default is copied when it is taken."""
        return self


def _check_finite(tree: dict[str, Any]) -> dict[str, Any]:
    """Refuse infinite numbers: `1e400` is read as one, has no form in JSON, and would be written as
    another value."""
    left: list[Any] = [tree]
    num_values = 0
    while left:
        node = left.pop()
        num_values += 1
        if num_values > MAX_VALUES:
            raise ValueError(f"holds more than {MAX_VALUES} values")
        if isinstance(node, dict):
            left.extend(node.values())
        elif isinstance(node, list | tuple):
            left.extend(node)
        elif isinstance(node, float) and not math.isfinite(node):
            raise ValueError(f"holds the number {node}, which JSON cannot write")
    return tree


JsonObject = Annotated[dict[str, Any], AfterValidator(_check_finite)]
"""An object whose inside belongs to somebody else."""


class ComponentConfig(Config):
    """A registered part by name, with its arguments."""

    name: str = Field(min_length=1, max_length=128)
    """Registered name of the part."""
    args: JsonObject = {}
    """Keyword arguments of the part, checked against its own schema."""


class PluginConfig(ComponentConfig):
    """A part that an installed package registers through an entry point, where a section has a `type`."""

    type: Literal["plugin"] = "plugin"
    args: JsonObject = {}
    """Settings of the part, checked against its own `Args` by the process that uses it."""


class WorkflowRef(ComponentConfig):
    """A registered workflow."""

    version: str | None = Field(default=None, max_length=64)
    """The version that must be registered; None takes whichever is."""
