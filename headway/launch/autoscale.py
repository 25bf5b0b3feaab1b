"""The loop that keeps a fleet at the size that its gateway asks for."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from headway.contracts.errors import NotFound, ServiceError
from headway.contracts.http.servers import ScaleResponse

log = logging.getLogger(__name__)


class Scales(Protocol):
    """Who says how many servers are wanted: a client of a gateway."""

    def scale(self) -> ScaleResponse:
        """Return what is wanted now."""


class Resizable(Protocol):
    """Generation servers whose number can change."""

    name: str

    def replicas(self) -> int:
        """Return how many there are to be.

        Raises:
            NotFound: there is no such thing any more.
            ServiceError: nobody answers who knows.
        """

    def resize(self, replicas: int) -> None:
        """Set how many there are to be.

        Raises:
            NotFound, ServiceError: as `replicas`.
        """


def follow(gateway: Scales, servers: Resizable, least: int, most: int, every_s: float) -> None:
    """Look again and again. What does not answer is asked again at the next look."""
    failure = ""
    while True:
        try:
            look(gateway, servers, least, most)
            failure = ""
        except NotFound:
            raise
        except ServiceError as error:
            if str(error) != failure:  # said once
                log.warning("not scaled", extra={"why": str(error)})
            failure = str(error)
        time.sleep(every_s)


def look(gateway: Scales, servers: Resizable, least: int, most: int) -> None:
    """Bring servers to the number that is wanted, within these bounds.

    Raises:
        ServiceError: the gateway, or who resizes, did not answer.
    """
    wish = gateway.scale()
    wanted = min(max(wish.wanted, least), most)
    there = servers.replicas()
    if there != wanted:
        servers.resize(wanted)
        log.info(
            "scaled",
            extra={
                "servers": servers.name,
                "before": there,
                "now": wanted,
                "why": wish.reason,
            },
        )
