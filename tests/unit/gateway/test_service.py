"""Attach, detach and resume: the counters of a consumer survive restarts of both sides."""

import asyncio

import pytest

from headway.contracts.errors import Conflict, NotEnoughWork, NotFound
from headway.contracts.types import WeightUpdateMeta
from tests.unit.gateway.generators import never


async def step(bench, number: int, count: int = 2, checkpoint_step: int = -1) -> list[str]:
    """One trainer step: a batch, its consumption, the next version."""
    groups = await bench.wait(count, f"d{number}", timeout_s=5.0)
    names = [group.rollout_id for group in groups]
    await bench.service.consumed(names, number, checkpoint_step)
    await bench.publish(number + 1)
    return names


def names(num: int, start: int = 0) -> list[str]:
    return [f"r{index}" for index in range(start, start + num)]


async def test_a_synchronous_consumer_plays_one_batch_per_version(open_service):
    bench = await open_service()
    await bench.attach(batch_size=2, max_staleness=0)
    await bench.submit(*names(5))
    await bench.until_counts(ready=2)
    assert (await bench.service.status()).capacity == 0
    assert await step(bench, 0) == ["r0", "r1"]
    await bench.until_counts(ready=2, consumed=2)
    assert await step(bench, 1) == ["r2", "r3"]
    audit = await bench.service.ledger.audit()
    assert (audit.max_staleness, audit.lost, audit.duplicated) == (0, 0, 0)


async def test_staleness_opens_that_many_batches_more(open_service):
    bench = await open_service()
    await bench.attach(batch_size=2, max_staleness=2)
    await bench.submit(*names(20))
    await bench.until_counts(ready=6, queued=14)
    for number in range(4):
        await step(bench, number)
    await bench.until_counts(ready=6, consumed=8)
    assert (await bench.service.ledger.audit()).max_staleness == 2


async def test_nothing_more_starts_before_servers_have_swapped(open_service):
    bench = await open_service()
    await bench.attach(batch_size=1, max_staleness=0)
    for name in "ab":
        await bench.submit(name)
    await bench.wait(1, "d1")
    await bench.service.consumed(("a",), 0, -1)
    bench.generator.swapping_from = 0
    await bench.publish(1)
    assert (await bench.service.status()).capacity == 0
    assert not bench.generator.attempts["b.0"]
    bench.generator.swapping_from = None
    bench.service.changed.notify()
    assert await bench.wait(1, "d2")


async def test_a_due_group_holds_the_batch_back(open_service):
    gate = asyncio.Event()

    async def first_is_slow(req, attempt):
        if req.rid.startswith("r0."):
            await gate.wait()
        return [7]

    bench = await open_service(first_is_slow)
    await bench.attach(batch_size=1, max_staleness=1)
    await bench.submit(*names(4))
    await bench.until_counts(ready=1)
    assert await step(bench, 0, count=1) == ["r1"]  # r0 may still be taken at version 1
    await bench.until_counts(ready=1)
    assert await bench.wait(1, "held", timeout_s=0.05) is None
    gate.set()
    assert await step(bench, 1, count=1) == ["r0"]
    audit = await bench.service.ledger.audit()
    assert (audit.max_staleness, audit.counts.stale) == (1, 0)


async def test_a_trainer_ahead_of_what_serves_gets_nothing_too_stale(open_service):
    """As after a resumption, which takes a version for itself, while the next is on its way."""
    bench = await open_service()
    await bench.attach(batch_size=1, max_staleness=1)
    await bench.submit(*names(2))
    await bench.until_counts(ready=2)
    await bench.attach(batch_size=1, max_staleness=1, version=1)
    await bench.submit("new")
    await bench.until_counts(ready=2, queued=1)
    with pytest.raises(NotEnoughWork):
        await bench.wait(2, version=2)
    assert (await bench.service.ledger.audit()).counts.stale == 2


async def test_a_version_that_is_far_too_high_drops_nothing_that_is_sampled_now(open_service):
    bench = await open_service()
    await bench.attach(batch_size=2, max_staleness=1)
    await bench.submit(*names(2))
    await bench.until_counts(ready=2)
    assert len(await bench.wait(2, version=2**30)) == 2


async def test_rollouts_of_others_are_not_bounded(open_service):
    bench = await open_service()
    await bench.attach(batch_size=1, max_staleness=0)
    await bench.submit(*names(3))
    await bench.submit("eval1", "eval2", "eval3", consumer="you")
    await bench.until_counts(ready=4, queued=2)
    groups = await bench.wait(3, consumer="you")
    assert [group.rollout_id for group in groups] == ["eval1", "eval2", "eval3"]


async def test_a_second_consumer_is_refused(open_service):
    bench = await open_service()
    await bench.attach()
    with pytest.raises(Conflict, match="consumer 'me' is attached; detach it first"):
        await bench.attach(consumer="you")
    assert await bench.attach() == 0


async def test_detach_cancels_what_is_not_consumed_and_lifts_the_bound(open_service):
    bench = await open_service()
    await bench.attach(batch_size=2, max_staleness=0)
    await bench.submit(*names(6))
    await step(bench, 0)
    await bench.until_counts(ready=2)
    assert await bench.service.detach("me") == 4
    counts = await bench.ledger.counts()
    assert (counts.consumed, counts.cancelled) == (2, 4)
    status = await bench.service.status()
    assert (status.max_staleness, status.capacity) == (None, 512)
    with pytest.raises(NotFound, match="'me' is not attached"):
        await bench.service.detach("me")
    await bench.attach(consumer="you")


async def test_detach_stops_what_is_in_play(open_service):
    bench = await open_service(never)
    await bench.attach(batch_size=4)
    await bench.submit("a", "b", size=2)
    await bench.until(lambda: len(bench.generator.playing) == 4)
    assert await bench.service.detach("me") == 4
    assert not bench.generator.playing
    assert (await bench.ledger.counts()).cancelled == 4


async def test_a_consumer_resumes_from_its_checkpoint(open_service):
    bench = await open_service()
    await bench.attach(batch_size=2, max_staleness=1)
    await bench.submit(*names(12))
    for number in range(3):
        await step(bench, number, checkpoint_step=0)
    await bench.wait(2, "lost-with-the-trainer")
    # Checkpoint of step 0: steps 1 and 2 and a delivery are given back. Versions go on at 4.
    await bench.publish(4)
    assert await bench.attach(batch_size=2, max_staleness=10, step=0, version=4) == 6
    counts = await bench.ledger.counts("me")
    assert (counts.consumed, counts.delivered) == (2, 0)
    assert await step(bench, 4) == ["r2", "r3"]
    assert await step(bench, 5) == ["r4", "r5"]
    audit = await bench.service.ledger.audit()
    assert (audit.lost, audit.duplicated) == (0, 0)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
async def test_a_restarted_service_restores_the_counters(open_service, num_steps):
    bench = await open_service()
    await bench.attach(batch_size=2, max_staleness=1)
    await bench.submit(*names(20))
    for number in range(num_steps):
        await step(bench, number)
    await bench.until_counts(ready=4)
    before = await bench.service.status()
    await bench.service.aclose()
    again = await open_service(ledger=bench.ledger, version=num_steps)
    again.publisher = bench.publisher
    after = await again.service.status()
    assert (
        (after.capacity, after.max_staleness) == (before.capacity, before.max_staleness) == (0, 1)
    )
    assert after.counts == before.counts
    assert await step(again, num_steps) == [f"r{2 * num_steps}", f"r{2 * num_steps + 1}"]
    await again.until_counts(ready=4)
    with pytest.raises(Conflict):
        await again.attach(consumer="you")


async def test_a_detached_consumer_stays_detached_after_a_restart(open_service):
    bench = await open_service()
    await bench.attach()
    await bench.service.detach("me")
    await bench.service.aclose()
    again = await open_service(ledger=bench.ledger)
    assert (await again.service.status()).max_staleness is None


async def test_what_was_in_play_before_the_consumer_attached_counts_too(open_service):
    gate = asyncio.Event()

    async def gated(req, attempt):
        await gate.wait()
        return [7]

    bench = await open_service(gated)
    await bench.submit("early1", "early2")
    await bench.until(lambda: len(bench.generator.playing) == 2)
    await bench.attach(batch_size=2, max_staleness=0)
    await bench.submit("late1", "late2")
    gate.set()
    await bench.until_counts(ready=2)
    assert await step(bench, 0) == ["early1", "early2"]
    assert await step(bench, 1) == ["late1", "late2"]
    audit = await bench.service.ledger.audit()
    assert (audit.max_staleness, audit.counts.stale) == (0, 0)


async def test_updates_are_counted_once(open_service):
    bench = await open_service()
    for version in (1, 1, 2):
        await bench.service.updates.update(WeightUpdateMeta(version, "nowhere"))
    status = await bench.service.status()
    assert (status.version, status.updates) == (2, 2)
