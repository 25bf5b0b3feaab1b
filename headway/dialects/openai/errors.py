"""Failures as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

from headway.dialects.error_shapes import ApiFailure

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def openai_error(failure: ApiFailure) -> dict[str, Any]:
    """A failure as OpenAI's clients read it."""
    kind = "server_error" if failure.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": failure.message,
            "type": ERROR_TYPES.get(failure.status, kind),
            "param": failure.param,
            "code": failure.code,
        }
    }
