"""The base of every configuration section and of every record that enters from outside."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Config(BaseModel):
    """Frozen; an unknown key is an error; the string under a field is its documentation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )


class PartConfig(Config):
    """A registered part by name, with its arguments."""

    name: str = Field(min_length=1, max_length=128)
    """Registered name of the part."""
    args: dict[str, Any] = {}
    """Keyword arguments of the part, checked against its own schema."""
