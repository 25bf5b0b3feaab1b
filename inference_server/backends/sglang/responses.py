"""SGLang's answers to control calls: an object, or an error of ours."""

from __future__ import annotations

from typing import Any

from headway.contracts.errors import BackendError, SyncError
from inference_server.backends.engine_process import EngineProcess, EngineResponse

MISSING = (404, 405)
"""Status codes of a route that this version of SGLang does not have."""


def body_of(answer: EngineResponse) -> dict[str, Any]:
    """The object that the engine answered.

    Raises:
        BackendError: it answered an error, or something else.
    """
    body = answer.json()
    if not answer.is_ok or not isinstance(body, dict):
        raise BackendError(f"SGLang answered {answer.status}: {answer.text()}")
    return body


def expect_success(answer: EngineResponse, key: str = "success") -> None:
    """Check that the engine reported success.

    Raises:
        SyncError: it refused.
    """
    body = answer.json()
    if not answer.is_ok or not isinstance(body, dict) or not body.get(key):
        fields = body if isinstance(body, dict) else {}
        message = fields.get("message") or fields.get("error_message")
        raise SyncError(f"SGLang refused ({answer.status}): {message or answer.text()}")


async def read_page(engine: EngineProcess, *paths: str) -> dict[str, Any]:
    """The first of these pages that the engine has.

    Raises:
        BackendError: it has none, or did not answer.
    """
    for path in paths:
        answer = await engine.get(path)
        if answer.status not in MISSING:
            return body_of(answer)
    raise BackendError(f"{engine.url} has none of {', '.join(paths)}; is it SGLang?")


async def read_label(engine: EngineProcess) -> str | None:
    """The name of the weights that serve; None on a server that gives none."""
    info = await read_page(engine, "/model_info", "/get_model_info")
    label = info.get("weight_version")
    return None if label is None else str(label)
