"""Adapters beside the base."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request

from headway.contracts.config.base import Identifier
from headway.contracts.http import paths
from headway.contracts.http.adapters import AdapterRequest, AdaptersView, AdapterView
from headway.runtime.json_route import JsonRoute
from inference_server.dialects.headway.generation import local

router = APIRouter(route_class=JsonRoute)
Name = Annotated[Identifier, Path()]


@router.get(paths.ADAPTERS)
async def adapters(request: Request) -> AdaptersView:
    versions = local(request).adapters.versions
    return AdaptersView(
        adapters=[AdapterView(name=name, version=version) for name, version in versions.items()]
    )


@router.put(paths.ADAPTER)
async def load(name: Name, body: AdapterRequest, request: Request) -> AdapterView:
    version = await local(request).adapters.load(name, body.path, body.version)
    return AdapterView(name=name, version=version)


@router.delete(paths.ADAPTER, status_code=204)
async def unload(name: Name, request: Request) -> None:
    await local(request).adapters.unload(name)
