"""Observers of the ledger hear of every attempt and every delivery of their gateway, once."""

from __future__ import annotations

import asyncio

from gateway.execution import executor
from gateway.ledger.observer import Attempt
from gateway.ledger.records import Lease
from headway.contracts.config.base import ComponentConfig
from headway.contracts.errors import BackendError, DataError, Fenced, StateError
from headway.contracts.types import LLMRequest, TrajectoryGroup


class Recorder:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.deliveries: list[tuple[int, int]] = []
        self.expirations: list[int] = []

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        return [(attempt.request.rollout_id, attempt.outcome) for attempt in self.attempts]

    def ended(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)

    def delivered(self, staleness: int, num_trajectories: int) -> None:
        self.deliveries.append((staleness, num_trajectories))

    def expired(self, num_groups: int) -> None:
        self.expirations.append(num_groups)


async def test_attempts_are_observed_as_they_end(open_service):
    async def answer(req: LLMRequest, attempt: int) -> list[int]:
        if req.rid.startswith("broken"):
            raise DataError("it broke")
        if req.rid.startswith("moved") and attempt == 1:
            raise BackendError("its server was lost")
        return [7]

    seen = Recorder()
    bench = await open_service(answer, observers=[seen])
    await bench.submit("kept", "broken", "moved")
    above_half = ComponentConfig(name="reward_range", args={"low": 0.5, "high": 1.0})
    await bench.submit("dropped", filter=above_half)
    await bench.until(lambda: len(seen.attempts) == 5)
    assert sorted(seen.outcomes) == [
        *(("broken", "failed"), ("dropped", "filtered"), ("kept", "ready")),
        *(("moved", "ready"), ("moved", "requeued")),
    ]
    assert all(attempt.seconds >= 0 for attempt in seen.attempts)
    for attempt in seen.attempts:
        assert (attempt.group is not None) == (attempt.outcome == "ready")


async def test_an_attempt_whose_answer_was_lost_is_observed_once(open_service, monkeypatch):
    seen, num_told = Recorder(), 0
    bench = await open_service(observers=[seen])
    complete = bench.ledger.complete

    async def complete_with_a_loss(lease: Lease, group: TrajectoryGroup) -> None:
        nonlocal num_told
        num_told += 1
        await complete(lease, group)
        if num_told == 1:
            raise StateError("its answer was lost")

    monkeypatch.setattr(executor, "OUTAGE_PAUSE_S", 0.0)
    monkeypatch.setattr(bench.ledger, "complete", complete_with_a_loss)
    await bench.submit("a")
    await bench.until(lambda: seen.attempts)
    await bench.submit("b")
    await bench.until(lambda: len(seen.attempts) > 1)
    assert num_told == 3
    assert seen.outcomes == [("a", "ready"), ("b", "ready")]


async def test_what_the_ledger_refuses_is_not_observed(open_service, monkeypatch):
    seen, may_end, was_refused = Recorder(), asyncio.Event(), asyncio.Event()

    async def answer(req: LLMRequest, attempt: int) -> list[int]:
        if req.rid.startswith("cancelled"):
            await may_end.wait()
        return [7]

    bench = await open_service(answer, observers=[seen])
    complete = bench.ledger.complete

    async def watched(lease: Lease, group: TrajectoryGroup) -> None:
        try:
            await complete(lease, group)
        except Fenced:
            was_refused.set()
            raise

    monkeypatch.setattr(bench.ledger, "complete", watched)
    await bench.submit("cancelled")
    await bench.until(lambda: bench.generator.playing)
    assert await bench.ledger.cancel(["cancelled"], "another gateway was asked to") == 1
    may_end.set()
    await asyncio.wait_for(was_refused.wait(), 10)
    await bench.submit("b")
    await bench.until(lambda: seen.attempts)
    assert seen.outcomes == [("b", "ready")]


async def test_staleness_is_observed_at_the_first_delivery(open_service):
    seen = Recorder()
    bench = await open_service(version=1, observers=[seen])
    await bench.submit("a", size=2)
    await bench.until_counts(ready=2)
    await bench.publish(3)
    await bench.submit("b", size=3)
    await bench.until_counts(ready=5)
    assert await bench.wait(3, "d0", timeout_s=0) is None
    for _ in range(2):
        assert len(await bench.wait(2, "d1")) == 2
    assert seen.deliveries == [(2, 2), (0, 3)]
    assert len(await bench.wait(1, "d2", rollout_ids=await _finished(bench, "c"))) == 1
    assert seen.deliveries[2:] == [(0, 1)]


async def _finished(bench, name: str) -> tuple[str, ...]:
    await bench.submit(name)
    await bench.until_counts(ready=1)
    return (name,)


async def test_expirations_are_observed(open_service):
    seen = Recorder()
    bench = await open_service(observers=[seen], lease_s=0.04)
    await bench.service.executor.stop_claiming()
    await bench.submit("a", timeout_s=0.001)
    await bench.until(lambda: seen.expirations)
    assert seen.expirations == [1]
