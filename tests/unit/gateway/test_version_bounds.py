"""Rollouts that ask for policy versions: at least, at most, or one for all tokens."""

from __future__ import annotations

import asyncio

import pytest

from headway.contracts.config.base import ComponentConfig
from headway.contracts.errors import ErrorBudgetExceeded, RolloutsFailed
from headway.contracts.types import VersionBounds
from tests.unit.gateway.generators import never


async def test_a_rollout_waits_for_its_version(open_service):
    bench = await open_service()
    await bench.submit("a", versions=VersionBounds(min_version=2))
    await bench.submit("b")
    (group,) = await bench.wait(1, "d1", rollout_ids=("b",))
    assert not bench.generator.attempts["a.0"]
    for version in (1, 2):
        await bench.publish(version)
    (group,) = await bench.wait(1, "d2", rollout_ids=("a",))
    assert set(group.trajectories[0].versions) == {-1, 2}


async def test_a_rollout_fails_once_its_version_is_past(open_service):
    bench = await open_service(error_budget=9)
    await bench.publish(3)
    await bench.submit("late", versions=VersionBounds(max_version=2))
    await bench.submit("in-time", versions=VersionBounds(max_version=3))
    assert await bench.wait(1, "d1", rollout_ids=("in-time",))
    with pytest.raises(RolloutsFailed, match=r"version 3 serves, versions\.max_version=2"):
        await bench.wait(1, "d2", rollout_ids=("late",))


async def test_a_pinned_group_that_meets_a_swap_is_played_anew(open_service):
    gate = asyncio.Event()

    async def second_is_slow(req, attempt):
        if req.rid.endswith(".1") and attempt == 1:
            await gate.wait()
        return [7]

    bench = await open_service(second_is_slow)
    bench.generator.stamps_late = True
    await bench.submit("a", size=2, versions=VersionBounds(pin=True))
    await bench.until(lambda: bench.generator.playing == {"a.1"})
    await bench.publish(1)
    gate.set()
    (group,) = await bench.wait(1)
    assert {int(v) for row in group.trajectories for v in row.versions} == {-1, 1}
    assert (await bench.service.ledger.audit()).requeues == 2


async def test_a_filter_drops_groups_and_their_capacity_returns(open_service):
    bench = await open_service()
    await bench.attach(batch_size=2, max_staleness=0)
    keep_mixed = ComponentConfig(name="reward_range", args={"low": 0.0, "high": 1.0})
    await bench.submit("all-wrong", size=2, filter=keep_mixed)
    await bench.until_counts(filtered=2)
    assert (await bench.service.status()).capacity == 2
    await bench.submit("kept", size=2)
    (group,) = await bench.wait(1)
    assert group.rollout_id == "kept"
    entry = await bench.ledger.get("all-wrong")
    assert (entry.state, entry.mean_reward) == ("filtered", 0.0)
    assert "mean" in entry.reason


async def test_a_timeout_counts_from_submission(open_service):
    bench = await open_service(never, error_budget=9, lease_s=0.2)
    await bench.submit("a", timeout_s=0.1)
    await bench.until_counts(failed=1)
    with pytest.raises(RolloutsFailed, match=r"timeout_s=0\.1"):
        await bench.wait(1, rollout_ids=("a",))


async def test_higher_priority_is_played_first(open_service):
    played = []

    async def note(req, attempt):
        played.append(req.rid[0])
        return [7]

    bench = await open_service(note, max_concurrent=1)
    await bench.service.executor.stop_claiming()
    for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", -1)):
        await bench.submit(name, priority=priority)
    again = await open_service(note, ledger=bench.ledger, max_concurrent=1)
    await again.until_counts(ready=4)
    assert "".join(played) == "bcad"


async def test_an_exact_version_is_asked_for_by_its_number(open_service):
    asked = []

    async def note(req, attempt):
        asked.append(req.version)
        return [7]

    bench = await open_service(note, error_budget=9)
    await bench.publish(2)
    exactly = VersionBounds(min_version=2, max_version=2, pin=True)
    await bench.submit("a", versions=exactly)
    await bench.submit("b", versions=VersionBounds(min_version=1))
    assert len(await bench.wait(2)) == 2
    assert asked == [2, None]


async def test_a_version_that_some_servers_keep_is_played_although_a_newer_one_serves(open_service):
    bench = await open_service(error_budget=9)
    await bench.publish(3)
    bench.generator.kept = 2
    exactly = VersionBounds(min_version=2, max_version=2, pin=True)
    await bench.submit("kept", versions=exactly)
    (group,) = await bench.wait(1, "d1", rollout_ids=("kept",))
    assert set(group.trajectories[0].versions) == {-1, 2}
    bench.generator.kept = None
    await bench.submit("gone", versions=exactly)
    with pytest.raises(RolloutsFailed, match=r"version 3 serves, versions\.max_version=2"):
        await bench.wait(1, "d2", rollout_ids=("gone",))


async def test_staleness_counts_from_the_version_that_is_asked_about(open_service):
    bench = await open_service()
    await bench.submit("a")
    await bench.until_counts(ready=1)
    await bench.publish(5)
    await bench.wait(1, "d1", rollout_ids=("a",), version=0)
    assert (await bench.ledger.get("a")).staleness == 0


async def test_failures_of_others_do_not_spend_the_attached_consumers_budget(open_service):
    async def only_mine(req, attempt):
        if req.rid.startswith("theirs"):
            raise RuntimeError("no")
        return [7]

    bench = await open_service(only_mine, error_budget=1)
    await bench.attach(batch_size=1, max_staleness=9)
    for number in range(3):
        await bench.submit(f"theirs-{number}", consumer="evaluation")
    await bench.until_counts(failed=3)
    await bench.submit("mine")
    assert await bench.wait(1, "d1")
    with pytest.raises(
        ErrorBudgetExceeded, match="3 of the last 3 rollouts of 'evaluation' failed"
    ):
        await bench.wait(1, "d2", consumer="evaluation")
