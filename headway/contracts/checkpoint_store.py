"""Names in a store of versions, each a Hugging Face directory or what changed since another one.

weight_v000007/model.safetensors.index.json     written last: with it the version is complete
latest                                          optional: name of the version that is to serve
"""

from __future__ import annotations

INDEX_NAME = "model.safetensors.index.json"
POINTER_NAME = "latest"
PREFIX = "weight_v"
MAX_DIGITS = 18


def version_name(version: int) -> str:
    """Name of a version's directory."""
    return f"{PREFIX}{version:06d}"


def number_of(name: str) -> int | None:
    """Number of a version by its directory's name; None if it is no version's."""
    number = name.removeprefix(PREFIX)
    is_number = name.startswith(PREFIX) and number.isascii() and number.isdecimal()
    return int(number) if is_number and len(number) <= MAX_DIGITS else None
