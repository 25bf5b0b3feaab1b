"""Structured log lines: one JSON object per line on stderr, with the process's role."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}

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
        line |= {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(role: str, level: int = logging.INFO) -> None:
    """Send this process's log to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
