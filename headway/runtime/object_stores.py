"""Object stores by URL (`s3://bucket/run`), read with fsspec, which is imported for the first of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headway.contracts.errors import ConfigError, ServiceError

_URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_MARKS = ("created", "etag", "ino", "last_modified", "lastmodified", "mtime", "size", "updated")
_DEFECTS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)
"""They show a mistake in a program, not that a store is away."""


def is_url(path: str) -> bool:
    """Whether a path is a URL, and names no directory of this machine."""
    return _URL.match(path) is not None


def open_objects(url: str) -> tuple[Any, str]:
    """The filesystem that a URL is of, and the path in it; nothing is asked of it yet.

    Raises:
        ConfigError: no package is installed that reads it.
    """
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(f"{url} is read with fsspec; pip install fsspec") from error
    try:
        filesystem, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{url} cannot be opened: {error}") from error
    return filesystem, str(path).rstrip("/")


def listed(objects: Any, folder: str) -> dict[str, dict[str, Any]]:
    """What a folder holds: name -> what fsspec says of it; nothing if it is not there."""
    try:
        found = objects.ls(folder, detail=True)
    except FileNotFoundError:
        return {}
    return {str(info["name"]).rstrip("/").rpartition("/")[2]: info for info in found}


@contextmanager
def os_errors() -> Iterator[None]:
    """Raise `OSError` for the errors that each package has of its own."""
    try:
        yield
    except (OSError, ServiceError, *_DEFECTS):
        raise
    except Exception as error:
        raise OSError(repr(error)) from error


def identity_of(info: Mapping[str, Any]) -> str:
    """Return what another object of the same name would not have, of what fsspec says of one."""
    return repr(sorted((key.lower(), str(info[key])) for key in info if key.lower() in _MARKS))
