"""Background work of a gateway: it follows other gateways, observes its servers, warms up."""

from __future__ import annotations

import asyncio
import logging
import time

from gateway.app.fleet import Fleet
from gateway.dashboard.history import INTERVAL_S, ServiceHistory
from gateway.fleet.concurrency import AdaptiveBound
from gateway.fleet.scale import headroom_of
from gateway.service.service import RolloutService
from gateway.versions.publication_state import PublicationState
from headway.contracts.errors import RewardOutage, StateError

log = logging.getLogger(__name__)

OBSERVE_S = 1.0
"""Seconds between looks at the servers' caches."""


async def warm_up(service: RolloutService) -> None:
    """Start the processes that run verifiers, for which the first answer would wait otherwise."""
    try:
        await service.scorer.pool.start()
    except RewardOutage as error:
        log.warning("the first verifier will be tried again", extra={"reason": str(error)})


async def follow(state: PublicationState, service: RolloutService) -> None:
    """A version that another gateway committed admits as one of this gateway does."""
    while True:
        await state.changed.event().wait()
        service.changed.notify()


async def observe(fleet: Fleet, service: RolloutService, history: ServiceHistory) -> None:
    """Figures that are means over time, and the dashboard's curves."""
    while True:
        try:
            status = await service.status()
            fleet.scale(status.counts, headroom_of(status))
            history.note(time.time(), status)
        except StateError as error:
            log.warning("the ledger does not answer", extra={"reason": str(error)})
        await asyncio.sleep(INTERVAL_S)


async def adapt(bound: AdaptiveBound, fleet: Fleet, service: RolloutService) -> None:
    """Run fewer rollouts while servers run out of cache."""
    while True:
        before = bound.limit
        if bound.observe(fleet.statuses()) > before:
            service.changed.notify()
        await asyncio.sleep(OBSERVE_S)
