"""What vLLM's clients ask of one server beside generation: weights.

See `headway.dialects.vllm.routes`.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from headway.contracts.http import paths
from headway.dialects.error_shapes import FAILURES, route_in
from headway.dialects.openai.errors import openai_error
from headway.dialects.vllm.types import CollectiveCallBody, TransferBody, path_to_reload
from inference_server.dialects.sglang.group_updates import UpdateOptions
from inference_server.dialects.sglang.routes import published_from_disk

router = APIRouter(route_class=route_in(openai_error), responses=FAILURES)


@router.post(paths.VLLM_CALL)
async def reload_weights(body: CollectiveCallBody, request: Request) -> dict[str, Any]:
    """Publish a directory below one of `weights.allow`."""
    await published_from_disk(request, path_to_reload(body), UpdateOptions())
    return {"results": [None]}


@router.post(paths.VLLM_TRANSFER)
async def update_weights(body: TransferBody, request: Request) -> dict[str, str]:
    """Likewise, as prime-rl's trainer asks for it."""
    await published_from_disk(request, path_to_reload(body), UpdateOptions())
    return {"status": "ok"}
