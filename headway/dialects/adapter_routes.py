"""Adapters beside the base: loaded, listed and unloaded in our words, SGLang's and vLLM's.

The same on a server and on a gateway, which does it on all of its servers.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from headway.contracts.adapters import AdapterHost
from headway.contracts.config.base import Identifier
from headway.contracts.errors import ErrorBody, ServiceError
from headway.contracts.http import paths
from headway.contracts.http.adapters import AdapterRequest, AdaptersView, AdapterView, adapter_views
from headway.dialects.error_shapes import FAILURES, InvalidField, ShapedError, route_in
from headway.dialects.openai.errors import openai_error
from headway.dialects.sglang.errors import sglang_error
from headway.dialects.sglang.types import LoadAdapterBody, UnloadAdapterBody
from headway.dialects.vllm.types import AdapterBody
from headway.runtime.json_route import JsonRoute
from headway.runtime.logging import note_request

router = APIRouter(route_class=JsonRoute)
sglang_router = APIRouter(route_class=route_in(sglang_error), responses=FAILURES)
vllm_router = APIRouter(route_class=route_in(openai_error), responses=FAILURES)
ROUTERS = (router, sglang_router, vllm_router)
Name = Annotated[Identifier, Path()]


class AdapterFailure(BaseModel):
    """Response to a change of adapters that failed."""

    success: Literal[False]
    error_message: str
    loaded_adapters: dict[str, str]


ADAPTER_FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AdapterFailure | ShapedError | ErrorBody}
}


def adapter_host(request: Request) -> AdapterHost:
    """What serves the adapters of an app (`app.state.adapter_host`)."""
    host: AdapterHost = request.app.state.adapter_host
    return host


@router.get(paths.ADAPTERS)
async def adapters(request: Request) -> AdaptersView:
    return AdaptersView(adapters=adapter_views(adapter_host(request).versions))


@router.put(paths.ADAPTER)
async def load(name: Name, body: AdapterRequest, request: Request) -> AdapterView:
    version = await adapter_host(request).load(name, body.path, body.version)
    return AdapterView(name=name, version=version)


@router.delete(paths.ADAPTER, status_code=204)
async def unload(name: Name, request: Request) -> None:
    await adapter_host(request).unload(name)


@sglang_router.post(paths.SGLANG_LORA_LOAD, response_model=None, responses=ADAPTER_FAILURES)
async def load_lora_adapter(body: LoadAdapterBody, request: Request) -> Response:
    host = adapter_host(request)
    return await _changed(host, host.load(body.lora_name, body.lora_path))


@sglang_router.post(paths.SGLANG_LORA_UNLOAD, response_model=None, responses=ADAPTER_FAILURES)
async def unload_lora_adapter(body: UnloadAdapterBody, request: Request) -> Response:
    host = adapter_host(request)
    return await _changed(host, host.unload(body.lora_name))


@vllm_router.post(paths.VLLM_LORA_LOAD, response_class=Response)
async def load_adapter(body: AdapterBody, request: Request) -> Response:
    if body.lora_path is None:
        raise InvalidField("lora_path is missing; give the adapter's directory", "lora_path")
    await adapter_host(request).load(body.lora_name, body.lora_path)
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@vllm_router.post(paths.VLLM_LORA_UNLOAD, response_class=Response)
async def unload_adapter(body: AdapterBody, request: Request) -> Response:
    await adapter_host(request).unload(body.lora_name)
    return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _changed(host: AdapterHost, work: Awaitable[object]) -> Response:
    """The answer to a change; paths are not told, since only names address an adapter."""
    failure = ""
    try:
        await work
    except ServiceError as error:
        note_request(code=error.code, reason=error.message)
        failure = error.message
    names = {name: name for name in host.versions}
    answer = {"success": not failure, "error_message": failure, "loaded_adapters": names}
    return JSONResponse(answer, status_code=400 if failure else 200)
