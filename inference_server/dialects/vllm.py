"""What vLLM's clients ask of one server beside generation: weights and adapters.

See `headway.dialects.vllm.routes`.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from headway.contracts.http import paths
from headway.dialects.error_shapes import FAILURES, InvalidField, route_in
from headway.dialects.openai.errors import openai_error
from headway.dialects.vllm.types import AdapterBody, CollectiveCallBody, path_to_reload
from inference_server.dialects.headway.generation import local
from inference_server.dialects.sglang.group_updates import UpdateOptions
from inference_server.dialects.sglang.routes import published_from_disk

router = APIRouter(route_class=route_in(openai_error), responses=FAILURES)


@router.post(paths.VLLM_CALL)
async def reload_weights(body: CollectiveCallBody, request: Request) -> dict[str, Any]:
    """Publish a directory below one of `weights.allow`."""
    await published_from_disk(request, path_to_reload(body), UpdateOptions())
    return {"results": [None]}


@router.post(paths.VLLM_LORA_LOAD, response_class=Response)
async def load_adapter(body: AdapterBody, request: Request) -> Response:
    if body.lora_path is None:
        raise InvalidField("lora_path is missing; give the adapter's directory", "lora_path")
    await local(request).adapters.load(body.lora_name, body.lora_path)
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(paths.VLLM_LORA_UNLOAD, response_class=Response)
async def unload_adapter(body: AdapterBody, request: Request) -> Response:
    await local(request).adapters.unload(body.lora_name)
    return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
