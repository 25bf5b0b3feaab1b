"""Files of a model's directory, which somebody else has written."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from headway.contracts.errors import ConfigError

MAX_TEXT_BYTES = 256 << 20
"""Maximum bytes of a file that is read whole: a configuration, a tokenizer, a manifest."""


def check_regular(file: Path) -> None:
    """Refuse what is no file: a pipe would be waited for without end.

    Raises:
        ConfigError: it is none, or cannot be looked at.
    """
    try:
        is_regular = stat.S_ISREG(file.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if not is_regular:
        raise ConfigError(f"{file} is no regular file")


def check_text(file: Path) -> None:
    """Refuse what is no file, or too large to be read whole.

    Raises:
        ConfigError: it is.
    """
    check_regular(file)
    size = file.stat().st_size
    if size > MAX_TEXT_BYTES:
        raise ConfigError(f"{file} has {size} bytes, at most {MAX_TEXT_BYTES} are read")


def read_text(file: Path) -> str:
    """The text of a file.

    Raises:
        ConfigError: it cannot be read, is too large, or is not in UTF-8.
    """
    check_text(file)
    try:
        return file.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no text in UTF-8: {error}") from error


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: as `read_text`, or it holds none.
    """
    text = read_text(file)
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{file} holds a {type(read).__name__}; a JSON object is wanted")
    return read
