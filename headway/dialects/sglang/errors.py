"""Failures as SGLang's clients read them."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from headway.contracts.errors import ErrorBody, ServiceError
from headway.dialects.error_shapes import ApiFailure, ShapedError
from headway.runtime.logging import note_request


def sglang_error(failure: ApiFailure) -> dict[str, Any]:
    """SGLang's error body."""
    return {"error": {"message": failure.message}}


class UpdateFailure(BaseModel):
    """Response to an update that failed."""

    success: Literal[False]
    message: str
    num_paused_requests: int | None = None


UPDATE_FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": UpdateFailure | ShapedError | ErrorBody}
}


def failed_update(error: ServiceError, **more: Any) -> Response:
    """The response to an update that failed, which changed nothing."""
    note_request(code=error.code, reason=error.message)
    return JSONResponse({"success": False, "message": error.message, **more}, status_code=400)
