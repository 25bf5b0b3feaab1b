"""Registry of generation servers, for all gateways that share a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.contracts.http.servers import ServerReport


@dataclass(frozen=True, slots=True)
class SharedReport:
    """The newest report of one server."""

    report: ServerReport
    gateway: str
    """The one that it reported to."""
    number: int
    """Grows with every report, over all servers."""
    age_s: float
    """Seconds since the report, by the registry's clock."""
    drain_requested: bool
    """It shall drain, by somebody's order."""


class ServerRegistry(Protocol):
    """The reports of servers, under a lease each."""

    async def open(self) -> None:
        """Connect.

        Raises:
            StateError: it cannot be reached.
        """

    async def announce(
        self,
        gateway: str,
        reports: Sequence[ServerReport],
        lease_s: float,
        ages_s: Sequence[float] | None = None,
    ) -> None:
        """These servers reported to this gateway; they are members for `lease_s`.

        Args:
            ages_s: seconds since each report; None: they have just come.
        Raises:
            StateError: it could not be recorded.
        """

    async def members(self) -> list[SharedReport]:
        """Every server whose lease has not ended, by name. Raises as `announce`."""

    async def forget(self, server_id: str) -> None:
        """It is gone, or was never there. Raises as `announce`."""

    async def set_draining(self, server_id: str, drain_requested: bool) -> None:
        """Let a server drain, or end that; also while it is away.

        Raises:
            NotFound: it is no member.
        """

    async def close(self) -> None:
        """Disconnect."""
