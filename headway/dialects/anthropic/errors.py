"""Failures as Anthropic's clients read them."""

from __future__ import annotations

from typing import Any

from headway.dialects.error_shapes import ApiFailure

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(failure: ApiFailure) -> dict[str, Any]:
    """A failure as Anthropic's clients read it; it names the field at fault in its message."""
    kind = "api_error" if failure.status >= 500 else "invalid_request_error"
    return {
        "type": "error",
        "error": {"type": ERROR_TYPES.get(failure.status, kind), "message": failure.message},
    }
