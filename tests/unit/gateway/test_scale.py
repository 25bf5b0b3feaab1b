"""Servers are asked for where they would shorten the queue, and kept until they did not for long."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from gateway.fleet.scale import SETTLE_S, Demand, Scaler, wanted_servers
from headway.contracts.config.gateway import FleetConfig
from headway.contracts.http.ledger import LedgerCounts
from headway.contracts.http.servers import ServerState, ServerStatus


def fleet(count: int, kv_usage: float = 0.0, state: ServerState = "ready") -> list[ServerStatus]:
    return [
        ServerStatus(
            server_id=f"{state}{n}",
            url="http://localhost:1",
            version=0,
            kv_usage=kv_usage,
            state=state,
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("servers", "demand", "wanted", "reason"),
    [
        (fleet(2), Demand(0, 0), 1, "waits for work"),
        (fleet(0), Demand(5, 0), 1, "5 trajectories wait"),
        (fleet(2), Demand(500, 8), 2, "500 trajectories wait"),
        (fleet(2), Demand(100, 8, rate=0.5), 7, "100 trajectories wait"),
        (fleet(2), Demand(100, 8, headroom=16, rate=0.5), 2, "16 trajectories wait"),
        (fleet(2), Demand(100, 8, headroom=0, rate=0.5), 1, "staleness holds back 100"),
        (fleet(2), Demand(100, 8, headroom=-4, rate=0.5), 1, "staleness holds back 100"),
        (fleet(2, 0.7), Demand(0, 64, rate=0.5), 2, "running trajectories keep 2 busy"),
        (fleet(4, 0.3), Demand(0, 64, rate=0.5), 2, "running trajectories keep 2 busy"),
        (fleet(2, 1.0), Demand(0, 64, rate=0.5), 3, "running trajectories keep 3 busy"),
        (fleet(1), Demand(3, 1, rate=0.001), 4, "4 trajectories keep no more"),
        (fleet(2), Demand(9000, 8, rate=0.5), 50, r"max_servers=50; 9000 .* 600 servers"),
        (fleet(3, state="fenced"), Demand(15, 0, rate=0.5), 1, "15 trajectories wait"),
    ],
    ids=[
        "idle",
        "none_yet",
        "rate_unknown",
        "queue",
        "queue_within_headroom",
        "held_back",
        "overdrawn",
        "busy",
        "half_busy",
        "out_of_memory",
        "few_long_ones",
        "capped",
        "fenced_are_not_ready",
    ],
)
def test_wish(servers: list[ServerStatus], demand: Demand, wanted: int, reason: str):
    answer = wanted_servers(servers, demand, target_wait_s=30.0, max_servers=50)
    assert answer.wanted == wanted
    assert re.search(reason, answer.reason)


@given(
    st.integers(0, 8),
    st.floats(0.0, 1.0),
    st.builds(
        Demand,
        st.integers(0, 10_000),
        st.integers(0, 1000),
        st.none() | st.integers(-100, 1000),
        st.none() | st.floats(1e-4, 1e3),
    ),
)
def test_no_server_is_asked_for_that_would_have_nothing_to_do(
    count: int, kv_usage: float, demand: Demand
):
    answer = wanted_servers(fleet(count, kv_usage), demand, 30.0)
    assert 1 <= answer.wanted <= max(1, demand.running + demand.startable)
    is_known = demand.startable == 0 or demand.rate is not None
    assert (answer.queue_wait_s is not None) == is_known
    assert (answer.queue_wait_s or 0.0) >= 0.0


def counts(submitted: int, queued: int, leased: int) -> LedgerCounts:
    return LedgerCounts(
        submitted=submitted, queued=queued, leased=leased, ready=submitted - queued - leased
    )


def test_throughput_is_measured_per_server_while_they_work():
    scaler = Scaler(FleetConfig(target_queue_wait_s=10.0), CollectorRegistry())
    two = fleet(2, kv_usage=0.1)
    assert scaler.scale(two, counts(1000, 980, 20), None, now=0.0).wanted == 2  # not known yet
    answer = scaler.scale(two, counts(1000, 880, 20), None, now=25.0)  # 100 in 2 x 25 s
    assert answer.queue_wait_s == pytest.approx(880 / 4.0)
    assert answer.wanted == math.ceil(880 / (2.0 * 10.0))


def test_an_idle_hour_does_not_slow_servers_down():
    scaler = Scaler(FleetConfig(target_queue_wait_s=10.0), CollectorRegistry())
    one = fleet(1)
    scaler.scale(one, counts(100, 0, 100), None, now=0.0)
    scaler.scale(one, counts(100, 0, 0), None, now=50.0)
    scaler.scale(one, counts(100, 0, 0), None, now=3600.0)
    answer = scaler.scale(one, counts(200, 90, 10), None, now=3600.0)
    assert answer.queue_wait_s == pytest.approx(90 / 2.0, rel=0.01)


def test_growth_is_asked_for_at_once_and_shrinking_after_a_while():
    scaler = Scaler(FleetConfig(target_queue_wait_s=10.0), CollectorRegistry())
    four = fleet(4)
    scaler.scale(four, counts(400, 300, 100), None, now=0.0)
    assert scaler.scale(four, counts(400, 200, 100), None, now=10.0).wanted == 8
    calm = counts(400, 0, 4)
    for elapsed in range(20, int(SETTLE_S), 20):
        answer = scaler.scale(four, calm, None, now=10.0 + elapsed)
        assert answer.wanted == 4
        assert "after 300 s without need" in answer.reason
    assert scaler.scale(four, calm, None, now=20.0 + SETTLE_S).wanted == 4
    assert scaler.scale(four, calm, None, now=40.0 + SETTLE_S).wanted == 1


def test_the_answer_stands_in_the_metrics():
    metrics = CollectorRegistry()
    Scaler(FleetConfig(), metrics).scale(fleet(2, 0.5), counts(4, 4, 0), 3, now=0.0)
    page = generate_latest(metrics).decode()
    for line in (
        "wanted_servers 2.0",
        "ready_servers 2.0",
        "kv_usage 0.5",
        "headroom_trajectories 3.0",
    ):
        assert f"headway_scale_{line}" in page
