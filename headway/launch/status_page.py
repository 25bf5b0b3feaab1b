"""State of a gateway or server: as one page, as a page that is kept current, and as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headway.contracts.errors import NotFound, ServiceError
from headway.contracts.http.ledger import LedgerAudit, LedgerCounts
from headway.contracts.http.servers import ServerStatus
from headway.contracts.http.status import AwayService, StatusResponse
from headway.contracts.http.weights import WeightStatus
from headway.runtime.inference_client import RemoteInferenceEngine

WATCH_S = 2.0
STYLES = {
    "ready": "green",
    "reserved": "cyan",
    "joining": "yellow",
    "draining": "yellow",
    "lost": "red",
}
"""Colour by a server's state; others, which need a look, are red."""


def print_page(client: RemoteInferenceEngine) -> None:
    """Print the page once, with the ledger's audit."""
    page = status_page(client.status(), _weights(client), audit=client.audit())
    Console(soft_wrap=not sys.stdout.isatty()).print(page)


def print_json(client: RemoteInferenceEngine) -> None:
    """Print the status, the ledger's audit and the published versions, one after the other."""
    sys.stdout.write(client.status().model_dump_json(indent=1) + "\n")
    sys.stdout.write(client.audit().model_dump_json(indent=1) + "\n")
    if (weights := _weights(client)) is not None:
        sys.stdout.write(weights.model_dump_json(indent=1) + "\n")


def watch(client: RemoteInferenceEngine) -> None:
    """Show the page until Ctrl-C, without the audit, which replays the whole ledger."""
    before: tuple[float, StatusResponse] | None = None
    page: RenderableType = ""
    with Live(auto_refresh=False, screen=sys.stdout.isatty()) as live:
        while True:
            try:
                now, status = time.monotonic(), client.status()
                speed = None if before is None else _speed(*before, now, status)
                page = status_page(status, _weights(client), speed=speed)
                before = now, status
                live.update(page, refresh=True)
            except ServiceError as error:
                before = None
                live.update(Group(Text(str(error), "red"), "", page), refresh=True)
            time.sleep(WATCH_S)


def _speed(then: float, before: StatusResponse, now: float, status: StatusResponse) -> float:
    return max(0, status.generated_tokens - before.generated_tokens) / (now - then)


def _weights(client: RemoteInferenceEngine) -> WeightStatus | None:
    with suppress(NotFound):  # one server alone keeps no versions
        return client.weights()
    return None


def status_page(
    status: StatusResponse,
    weights: WeightStatus | None,
    audit: LedgerAudit | None = None,
    speed: float | None = None,
) -> Group:
    """Return the most important facts on one page.

    Args:
        weights: None from one server alone.
        audit: the ledger's audit, if it was asked for.
        speed: tokens per second lately, if that is known.
    """
    parts: list[RenderableType] = [
        _summary(status, weights, speed),
        "",
        _servers(status.servers),
        *(Text(f"  {s.server_id}: {s.reason}", "red") for s in status.servers if s.reason),
        "",
        _states(status.counts),
    ]
    if audit is not None:
        parts += ["", _proof(audit)]
    if status.services_away:
        parts += ["", Text("services away", "bold")]
        parts += [Text(f"  {_away(service)}", "yellow") for service in status.services_away]
    if status.last_failures:
        parts += ["", Text("last failures", "bold")]
        parts += [Text(f"  {reason}", "red") for reason in status.last_failures]
    return Group(*parts)


def _summary(status: StatusResponse, weights: WeightStatus | None, speed: float | None) -> Table:
    version = [f"{status.version} serves", f"{status.head} is the newest"]
    if weights is not None and weights.pinned is not None:
        version.append("pinned")
    if weights is not None and weights.publishing is not None:
        version.append(f"publishing {weights.publishing}")
    bound = "no bound" if status.max_staleness is None else f"at most {status.max_staleness}"
    rows = {
        "policy version": ", ".join(version),
        "in play": f"{status.running} trajectories, {status.capacity} more may start",
        "staleness": bound,
        "weight updates": f"{status.updates}, {status.updates_in_flight} of them in mid-generation",
        "context": _context(status),
        "generated": f"{status.generated_tokens:,} tokens"
        + ("" if speed is None else f", {speed:,.0f} per second"),
    }
    table = Table.grid(padding=(0, 3))
    for name, value in rows.items():
        table.add_row(Text(name, "dim"), Text(value))
    return table


def _context(status: StatusResponse) -> str:
    smallest, largest = status.smallest_context_tokens, status.largest_context_tokens
    if smallest is None or largest is None:
        return "not known"
    first = "" if smallest == largest else f"{smallest:,} to "
    return f"{first}{largest:,} tokens per sequence"


def _servers(servers: Sequence[ServerStatus]) -> RenderableType:
    if not servers:
        return Text("no generation server has reported itself", "yellow")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("server", overflow="fold")  # alone gives way on a narrow terminal
    for name in ("state", "version"):
        table.add_column(name, no_wrap=True)
    for name in ("running", "queued", "cache", "tokens"):
        table.add_column(name, no_wrap=True, justify="right")
    for server in servers:
        places = f" / {server.max_running}" if server.max_running else ""
        table.add_row(
            Text(server.server_id),
            Text(server.state, STYLES.get(server.state, "red")),
            str(server.version),
            f"{server.running}{places}",
            str(server.queued),
            f"{server.kv_usage:.0%}",
            f"{server.generated_tokens:,}",
        )
    return table


def _away(service: AwayService) -> str:
    return f"{service.url} for {service.away_s:.0f} s, {service.waiting} calls wait"


def _states(counts: LedgerCounts) -> Columns:
    """Return states with their counts, as many beside one another as there is room for."""
    shown = [
        Text.assemble((f"{state} ", "dim"), f"{count:,}")
        for state, count in counts.model_dump().items()
    ]
    return Columns(shown, padding=(0, 3), equal=True)


def _proof(audit: LedgerAudit) -> Text:
    is_sound = audit.lost == 0 and audit.duplicated == 0
    return Text(
        f"ledger: {audit.lost} lost, {audit.duplicated} consumed twice, {audit.requeues} requeued, "
        f"staleness at most {audit.max_staleness}",
        "green" if is_sound else "red",
    )
