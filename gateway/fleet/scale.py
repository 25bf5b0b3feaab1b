"""Number of generation servers that the work asks for: `GET /v1/scale`, for autoscalers and people.

More are wanted at once, fewer only after less was enough for `SETTLE_S`. Rollouts that staleness does
not let start are no work: further servers would be idle.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge

from gateway.fleet.concurrency import FULL
from headway.contracts.config.gateway import FleetConfig
from headway.contracts.http.ledger import LedgerCounts
from headway.contracts.http.servers import ScaleResponse, ServerStatus
from headway.contracts.http.status import StatusResponse
from headway.runtime.clock import monotonic

SETTLE_S = 300.0
"""Servers take minutes to start: what was wanted within this is still wanted."""
MEMORY_S = 120.0
"""Throughput is a mean over about this long."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Work to do, in trajectories."""

    queued: int
    running: int
    headroom: int | None = None
    """Trajectories that staleness lets start beyond those running; None has no bound."""
    rate: float | None = None
    """Ended per server and second; None while none has ended."""

    @property
    def startable(self) -> int:
        """Trajectories that wait for servers, and for nothing else."""
        return self.queued if self.headroom is None else min(self.queued, max(0, self.headroom))


def wanted_servers(
    servers: Sequence[ServerStatus],
    demand: Demand,
    target_wait_s: float,
    max_servers: int | None = None,
) -> ScaleResponse:
    """Number of servers that hold what is running, and start what waits within `target_wait_s`."""
    ready = [server for server in servers if server.state == "ready"]
    held = max(int(demand.running > 0), math.ceil(len(ready) * _occupancy(ready) / FULL))
    for_queue = _for_queue(len(ready), demand, target_wait_s)
    wanted, reason = max(
        (for_queue, f"{demand.startable} trajectories wait for servers"),
        (held, f"running trajectories keep {held} busy"),
        (1, "one server waits for work"),
        key=lambda choice: choice[0],
    )
    if for_queue < wanted and demand.startable < demand.queued:
        reason += f"; staleness holds back {demand.queued - demand.startable} trajectories"
    most = max(1, demand.running + demand.startable)
    if wanted > most:
        wanted, reason = most, f"{most} trajectories keep no more servers busy"
    if max_servers is not None and wanted > max_servers:
        reason = f"fleet.max_servers={max_servers}; {reason}, {wanted} servers"
        wanted = max_servers
    return ScaleResponse(
        ready=len(ready),
        wanted=wanted,
        reason=reason,
        queue_wait_s=_wait_s(len(ready), demand),
        kv_usage=_mean([server.kv_usage for server in ready]),
        headroom=demand.headroom,
    )


def headroom_of(status: StatusResponse) -> int | None:
    """Return a service's `Demand.headroom`."""
    return None if status.max_staleness is None else status.capacity


class Scaler:
    """Measures throughput, and lets a fleet shrink slowly."""

    def __init__(self, config: FleetConfig, metrics: CollectorRegistry) -> None:
        self._config = config
        self._ended = 0.0
        self._server_s = 0.0
        self._last: tuple[float, int, bool] | None = None
        """Time, number of ended trajectories by then, and whether anything was running."""
        self._wishes: deque[tuple[float, int]] = deque()
        self._gauges = ScaleGauges(metrics)

    def scale(
        self,
        servers: Sequence[ServerStatus],
        counts: LedgerCounts,
        headroom: int | None,
        now: float | None = None,
    ) -> ScaleResponse:
        """To be asked every few seconds: it learns from what has ended since.

        Args:
            servers: all that are known.
            counts: of the ledger.
            headroom: see `Demand`.
            now: seconds of a clock that never goes back.
        """
        now = monotonic() if now is None else now
        self._measure(sum(server.state == "ready" for server in servers), counts, now)
        rate = self._ended / self._server_s if self._ended and self._server_s else None
        demand = Demand(counts.queued, counts.leased, headroom, rate)
        config = self._config
        wish = wanted_servers(servers, demand, config.target_queue_wait_s, config.max_servers)
        answer = self._settled(wish, now)
        self._gauges.show(answer)
        return answer

    def _measure(self, num_ready: int, counts: LedgerCounts, now: float) -> None:
        ended = counts.submitted - counts.queued - counts.leased - counts.cancelled
        if self._last is not None:
            then, ended_then, was_playing = self._last
            fading = math.exp(-(now - then) / MEMORY_S)
            self._ended = self._ended * fading + max(0, ended - ended_then)
            self._server_s *= fading
            if was_playing:
                self._server_s += num_ready * (now - then)
        self._last = now, ended, counts.leased > 0

    def _settled(self, wish: ScaleResponse, now: float) -> ScaleResponse:
        while len(self._wishes) > 1 and self._wishes[1][0] <= now - SETTLE_S:
            self._wishes.popleft()
        self._wishes.append((now, wish.wanted))
        is_young = self._wishes[0][0] > now - SETTLE_S
        lately = wish.ready if is_young else max(wanted for _, wanted in self._wishes)
        if wish.wanted >= min(wish.ready, lately):
            return wish
        reason = f"{wish.reason}; fewer are asked for after {SETTLE_S:g} s without need"
        return wish.model_copy(update={"wanted": min(wish.ready, lately), "reason": reason})


class ScaleGauges:
    """The latest answer; what there is no bound for is NaN."""

    def __init__(self, metrics: CollectorRegistry) -> None:
        def gauge(name: str, meaning: str) -> Gauge:
            return Gauge(f"headway_scale_{name}", meaning, registry=metrics)

        self._wanted = gauge("wanted_servers", "Generation servers that the work asks for")
        self._ready = gauge("ready_servers", "Generation servers that take traffic")
        self._wait = gauge("queue_wait_seconds", "Until what waits for servers has been started")
        self._usage = gauge("kv_usage", "Share of the caches in use, mean over ready servers")
        self._headroom = gauge("headroom_trajectories", "What staleness lets start now")

    def show(self, answer: ScaleResponse) -> None:
        """Set them all."""
        self._wanted.set(answer.wanted)
        self._ready.set(answer.ready)
        self._wait.set(math.nan if answer.queue_wait_s is None else answer.queue_wait_s)
        self._usage.set(answer.kv_usage)
        self._headroom.set(math.nan if answer.headroom is None else answer.headroom)


def _for_queue(num_ready: int, demand: Demand, target_wait_s: float) -> int:
    if demand.startable == 0:
        return 0
    if demand.rate is None:
        return max(1, num_ready)
    return math.ceil(demand.startable / (demand.rate * target_wait_s))


def _wait_s(num_ready: int, demand: Demand) -> float | None:
    """Return the seconds that the work waits; None while it cannot be estimated."""
    if demand.startable == 0:
        return 0.0
    if demand.rate is None:
        return None
    return demand.startable / (demand.rate * max(1, num_ready))


def _occupancy(ready: Sequence[ServerStatus]) -> float:
    """Return the larger of the used shares of memory and of slots, where all servers report them."""
    places = sum(server.max_running for server in ready)
    usage = _mean([server.kv_usage for server in ready])
    if not places or any(server.max_running == 0 for server in ready):
        return usage
    return max(usage, sum(server.running for server in ready) / places)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
