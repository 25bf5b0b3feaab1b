"""The bound on what is in play follows what the servers' caches hold."""

from __future__ import annotations

from gateway.fleet.concurrency import GROWTH_S, AdaptiveBound
from headway.contracts.http.servers import ServerState, ServerStatus


def server(
    name: str = "a",
    preemptions: int = 0,
    kv_usage: float = 0.5,
    queued: int = 0,
    max_running: int = 0,
    state: ServerState = "ready",
) -> ServerStatus:
    return ServerStatus(
        server_id=name,
        url="http://localhost:1",
        version=0,
        preemptions=preemptions,
        kv_usage=kv_usage,
        queued=queued,
        max_running=max_running,
        state=state,
    )


def test_preemptions_halve_it_once_a_second_at_most():
    bound = AdaptiveBound(64, 8)
    assert bound.observe([server()], 0.0) == 64
    assert bound.observe([server(preemptions=3)], 0.25) == 32
    assert bound.observe([server(preemptions=9)], 0.5) == 32
    assert bound.observe([server(preemptions=9)], 1.25) == 16  # for those of before
    assert bound.observe([server(preemptions=9, kv_usage=0.9)], 9.0) == 16


def test_it_stops_at_the_least():
    bound = AdaptiveBound(64, 8)
    for second in range(10):
        bound.observe([server(preemptions=second)], float(second))
    assert bound.limit == 8
    assert AdaptiveBound(4, 8).limit == 4


def test_it_grows_while_there_is_room():
    bound = AdaptiveBound(64, 8)
    bound.observe([server()], 0.0)
    bound.observe([server(preemptions=1)], 1.0)
    assert bound.observe([server(preemptions=1)], 1.0 + GROWTH_S / 4) == 48
    assert bound.observe([server(preemptions=1, kv_usage=0.8)], 2.0 + GROWTH_S) == 48
    assert bound.observe([server(preemptions=1, queued=1)], 3.0 + GROWTH_S) == 48
    assert bound.observe([server(preemptions=1)], 9 * GROWTH_S) == 64


def test_a_server_counts_by_its_capacity():
    bound = AdaptiveBound(100, 1)
    big, small = server("big", max_running=90), server("small", max_running=10)
    bound.observe([big, small], 0.0)
    hurt = small.model_copy(update={"preemptions": 1, "kv_usage": 1.0})
    assert bound.observe([big, hurt], 1.0) == 95
    assert bound.observe([big, hurt], 1.0 + GROWTH_S / 90) == 95 + 1


def test_who_left_came_back_or_began_anew_costs_nothing():
    bound = AdaptiveBound(64, 8)
    bound.observe([server("a", preemptions=5), server("b", preemptions=5)], 0.0)
    assert bound.observe([server("a", preemptions=5)], 1.0) == 64
    assert bound.observe([server("a", preemptions=1), server("b", preemptions=7)], 2.0) == 64
    assert bound.observe([server("a", preemptions=1), server("c", preemptions=70)], 3.0) == 64
    lost = server("a", preemptions=9, state="lost")
    assert bound.observe([lost, server("c", preemptions=70)], 4.0) == 64


def test_without_servers_it_stays():
    bound = AdaptiveBound(64, 8)
    bound.observe([server()], 0.0)
    bound.observe([server(preemptions=1)], 1.0)
    assert bound.observe([], 100.0) == 32
