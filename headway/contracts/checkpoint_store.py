"""Names in a store of versions, each a Hugging Face directory or what changed since another one.

weight_v000007/model.safetensors.index.json     written last: with it the version is complete
latest                                          optional: name of the version that is to serve
"""

from __future__ import annotations

from headway.contracts.errors import DataError

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


def named_version(text: str, pointer: object) -> str:
    """Return the version that `latest` names, below the directory of its run if it has one.

    Raises:
        DataError: it names none.
    """
    run, _, name = text.strip().rpartition("/")
    number = number_of(f"{PREFIX}{name.removeprefix(PREFIX)}")
    if number is None or run.startswith("/") or ".." in run.split("/"):
        raise DataError(
            f"{pointer} holds {text.strip()[:80]!r}; wanted is a name like weight_v000007"
        )
    return f"{run}/{version_name(number)}" if run else version_name(number)
