"""Structured log lines on stderr, with the process's role: JSON for programs, text on a terminal."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextvars import ContextVar
from typing import Any

from headway.contracts.config.base import LogFormat

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message"}
"""Fields that every record has, and uvicorn's copy of its message with colours."""

RESET = "\x1b[0m"
COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}

_of_request: ContextVar[dict[str, Any] | None] = ContextVar("of_request", default=None)


def open_request(request_id: str) -> dict[str, Any]:
    """Begin what is known about the request that this task serves; tasks that it starts share it."""
    known = {"request_id": request_id}
    _of_request.set(known)
    return known


def note_request(**fields: Any) -> dict[str, Any]:
    """Add to what is known about the request that this task serves, if it serves one."""
    known = _of_request.get()
    if known is None:
        return {}
    known.update(fields)
    return known


class JsonFormatter(logging.Formatter):
    """Time, level, role, message, and whatever was given as `extra`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _extras(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """The same for people, in local time; nothing in it can steer a terminal."""

    def __init__(self, role: str, is_coloured: bool) -> None:
        super().__init__()
        self._role = role
        self._colours = COLOURS if is_coloured else {}

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower():<7}"
        if (colour := self._colours.get(record.levelno)) is not None:
            level = f"{colour}{level}{RESET}"
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        extras = [f"{key}={_shown(value)}" for key, value in _extras(record).items()]
        line = " ".join([clock, level, f"{self._role}:", _printable(record.getMessage()), *extras])
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            line = "\n".join([line, *map(_printable, trace)])
        return line


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller gave; a name with `_` in front is of a library, which adds it to every record."""
    given = record.__dict__.items()
    return {key: value for key, value in given if key not in _STANDARD and not key.startswith("_")}


def _shown(value: Any) -> str:
    """A value as one word, in quotes where it would not be."""
    text = str(value)
    return text if text.isprintable() and text.split() == [text] else json.dumps(text)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def configure_logging(role: str, log_format: LogFormat = "auto", level: int = logging.INFO) -> None:
    """Send this process's log to stderr: as text if that is a terminal, else as JSON lines.

    Args:
        log_format: `text` and `json` do not ask for a terminal; colours always need one.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_terminal = sys.stderr.isatty()
    is_text = is_terminal if log_format == "auto" else log_format == "text"
    is_coloured = is_terminal and not os.environ.get("NO_COLOR")
    handler.setFormatter(TextFormatter(role, is_coloured) if is_text else JsonFormatter(role))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
