"""`/ui`: the page, which anybody may load, and `/v1/dashboard`: what it shows, which asks for a token.

The page is a handful of static files without a build step. It may load nothing from elsewhere and run
nothing inline; text from rollouts reaches it as JSON and is only ever set as text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse

from gateway.dashboard.history import INTERVAL_S, ServiceHistory
from gateway.service.routes import service_of, status_of
from headway import __version__
from headway.contracts.errors import NotFound
from headway.contracts.http import paths
from headway.contracts.http.servers import ScaleResponse
from headway.contracts.http.status import DashboardResponse, StatusResponse
from headway.contracts.http.weights import WeightStatus
from headway.runtime.json_route import JsonRoute

STATIC = Path(__file__).with_name("static")
INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


FleetView = Callable[[Request, StatusResponse], tuple[WeightStatus, ScaleResponse]]
"""Function that returns a gateway's versions and the number of servers that it asks for."""


def dashboard_routes(history: ServiceHistory, fleet_view: FleetView) -> APIRouter:
    """The routes of a gateway that shows itself.

    Args:
        history: of this gateway.
        fleet_view: of the gateway behind a request, with the status that it has now.
    """
    router = APIRouter(route_class=JsonRoute)
    files = {path.name: path for path in STATIC.iterdir() if path.suffix in MEDIA_TYPES}

    @router.get(paths.UI, response_class=FileResponse)
    async def page() -> FileResponse:
        return _answer(files[INDEX])

    @router.get(paths.UI_FILE, response_class=FileResponse)
    async def file(name: str) -> FileResponse:
        if name not in files:
            raise NotFound(f"the dashboard has no file {name[:64]!r}")
        return _answer(files[name])

    @router.get(paths.DASHBOARD)
    async def dashboard(
        request: Request, after: Annotated[float, Query(allow_inf_nan=False)] = 0.0
    ) -> DashboardResponse:
        service = service_of(request)
        status = await status_of(request)
        weights, scale = fleet_view(request, status)
        return DashboardResponse(
            service_version=__version__,
            now=time.time(),
            interval_s=INTERVAL_S,
            status=status,
            weights=weights,
            scale=scale,
            sessions_open=0 if service.sessions is None else service.sessions.num_open,
            history=history.since(after),
        )

    return router


def _answer(path: Path) -> FileResponse:
    return FileResponse(path, media_type=MEDIA_TYPES[path.suffix], headers=HEADERS)
