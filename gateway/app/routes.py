"""Routes of a gateway: its servers, and the versions that they serve."""

from __future__ import annotations

from fastapi import APIRouter, Request

from gateway.app.fleet import Fleet
from gateway.fleet.scale import headroom_of
from gateway.service.routes import service_of
from headway.contracts.http import paths
from headway.contracts.http.servers import (
    DrainRequest,
    ScaleResponse,
    ServerReport,
    ServerReportResponse,
    ServerStatus,
)
from headway.contracts.http.status import StatusResponse
from headway.contracts.http.weights import (
    ReservationEndRequest,
    ReservationStatus,
    WeightPinRequest,
    WeightReservation,
    WeightRollbackRequest,
    WeightStatus,
)
from headway.runtime.json_route import JsonRoute

fleet_routes = APIRouter(route_class=JsonRoute)


@fleet_routes.post(paths.SERVERS)
async def report_server(body: ServerReport, request: Request) -> ServerReportResponse:
    return _fleet(request).report(body)


@fleet_routes.post(paths.SERVERS_DRAIN)
async def drain_server(body: DrainRequest, request: Request) -> ServerStatus:
    return await _fleet(request).drain(body.server_id, body.drain)


@fleet_routes.get(paths.SCALE)
async def scale(request: Request) -> ScaleResponse:
    service = service_of(request)
    status = await service.status()
    return _fleet(request).scale(status.counts, headroom_of(status))


@fleet_routes.get(paths.WEIGHTS)
async def weights(request: Request) -> WeightStatus:
    return _fleet(request).weights.status()


@fleet_routes.post(paths.WEIGHTS_PIN)
async def pin(body: WeightPinRequest, request: Request) -> WeightStatus:
    return await _fleet(request).weights.pin(body.version)


@fleet_routes.post(paths.WEIGHTS_ROLLBACK)
async def rollback(body: WeightRollbackRequest, request: Request) -> WeightStatus:
    return await _fleet(request).weights.rollback(body.version)


@fleet_routes.post(paths.WEIGHTS_RESERVATION)
async def reserve(body: WeightReservation, request: Request) -> ReservationStatus:
    return await _fleet(request).weights.reserve(body)


@fleet_routes.delete(paths.WEIGHTS_RESERVATION, status_code=204)
async def end_reservation(body: ReservationEndRequest, request: Request) -> None:
    await _fleet(request).weights.end_reservation(body.name)


def fleet_view(request: Request, status: StatusResponse) -> tuple[WeightStatus, ScaleResponse]:
    """Versions of the fleet, and the servers that it asks for, for the dashboard."""
    fleet = _fleet(request)
    return fleet.weights.status(), fleet.scale(status.counts, headroom_of(status))


def _fleet(request: Request) -> Fleet:
    fleet: Fleet = request.app.state.service.generator
    return fleet
