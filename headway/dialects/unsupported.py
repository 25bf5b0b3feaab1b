"""Fields that an API knows and this service does not support. Such a field is declared all the
same, as `unsupported`: the client then learns why, and may still send the value that asks for
nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from headway.contracts.config.base import Config

UNCONSTRAINED = "calls of tools are not constrained to a grammar"


class RequestPart(Config):
    """A part of a request in which null and absent mean the same, also for names nobody knows.

    Clients send back what they were answered, with every field that their library knows.
    """

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


def unsupported(reason: str, *neutral: JsonValue) -> BeforeValidator:
    """Take null and the neutral values, and refuse every other one for this reason."""

    def check(value: JsonValue) -> JsonValue:
        if value is None or value in neutral:
            return value
        raise PydanticCustomError("refused", "{reason}", {"reason": reason})

    return BeforeValidator(check)


ToolChoice = Annotated[
    Literal["auto", "none"] | None,
    unsupported(f"a call cannot be forced: {UNCONSTRAINED}; send auto or none", "auto", "none"),
]
"""Whether the model may call tools."""
