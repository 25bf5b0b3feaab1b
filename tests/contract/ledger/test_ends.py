"""Ends before their time, second lives, expiry, forgetting, listings."""

import asyncio

import pytest

from headway.contracts.errors import Fenced, NotFound, RolloutsFailed
from tests.unit.gateway.ledger_suite import ALL, SEVERAL_PROCESSES, Play, admit, ids
from tests.unit.gateway.rollout_builders import make_group, make_request

on_shared_stores = pytest.mark.parametrize("store", SEVERAL_PROCESSES, indirect=True)


async def until_expired(ledger) -> int:
    """The clock is the store's: it cannot be turned."""
    groups = 0
    async with asyncio.timeout(10):
        while not groups:
            groups = await ledger.expire()
    return groups


async def in_every_open_state(play) -> None:
    await play.finish("consumed", "delivered", "ready", consumer="me")
    await play.deliver(2, consumer="me")
    await play.consume("consumed", checkpoint_step=0)
    await play.submit("leased", consumer="me")
    await play.lease()
    await play.submit("queued", consumer="me")
    await play.submit("other", consumer="you")


async def test_cancel_all_ends_what_is_not_consumed(ledger, play):
    await in_every_open_state(play)
    assert await ledger.cancel_all("me", "the consumer detached") == 8
    counts = await ledger.counts("me")
    assert (counts.consumed, counts.cancelled, counts.submitted) == (2, 8, 10)
    assert (await ledger.counts("you")).queued == 2
    assert await play.lease() == ["other"]
    assert await ledger.cancel_all("me", "again") == 0
    with pytest.raises(RolloutsFailed, match="'queued' is cancelled: the consumer detached"):
        await ledger.deliver_exactly("d9", ["queued"], 0)
    assert await ledger.submit([make_request("queued", consumer="me")], ALL) == [False]


async def test_cancel_ends_these(ledger, play):
    await in_every_open_state(play)
    names = ["queued", "leased", "ready", "delivered", "consumed", "unknown", "queued"]
    assert await ledger.cancel(names, "not needed") == 4
    assert await ledger.cancel(names, "not needed") == 0
    assert await play.state("consumed") == "consumed"
    for name in names[:4]:
        entry = await ledger.get(name, with_payload=True)
        assert (entry.state, entry.reason, entry.payload) == ("cancelled", "not needed", None)


async def test_who_plays_a_cancelled_rollout_is_told(ledger, play):
    await play.submit("a", "b")
    await play.lease()
    lease = play.leases["a"]
    await ledger.cancel(["a"], "not needed")
    assert await ledger.renew([lease.key, play.leases["b"].key]) == {lease.key}
    with pytest.raises(Fenced):
        await ledger.complete(lease, make_group("a"))
    assert await play.state("a") == "cancelled"


async def test_a_failed_rollout_is_revived_with_all_its_attempts(ledger, play):
    await play.submit("a", "b")
    await play.lease()
    await ledger.requeue(play.leases["a"], "once")
    await play.lease()
    old = play.leases["a"]
    await ledger.fail(old, "twice")
    assert await ledger.revive(["a", "b", "unknown", "a"]) == 1
    assert await play.lease() == ["a"]
    assert (old.attempt, play.leases["a"].attempt) == (2, 1)
    with pytest.raises(Fenced):
        await ledger.fail(old, "twice")
    await play.complete("a")
    assert ids(await play.deliver()) == ["a"]


async def test_what_overruns_its_time_fails(ledger, play):
    await play.submit("leased", timeout_s=0.001)
    await play.submit("endless")
    await play.lease()
    await play.submit("queued", timeout_s=0.001)
    expired = 0
    while expired < 2:
        expired += await until_expired(ledger)
    assert await play.state("endless") == "leased"
    for name in ("leased", "queued"):
        entry = await ledger.get(name)
        assert entry.state == "failed"
        assert entry.reason == f"its timeout_s=0.001 passed while it was {name}"
    assert await ledger.renew([play.leases["leased"].key]) == {play.leases["leased"].key}


async def test_time_starts_anew_when_a_rollout_is_revived(ledger, play):
    await play.submit("a", timeout_s=30.0)
    await play.lease()
    await ledger.fail(play.leases["a"], "reason")
    before = await ledger.get("a")
    await ledger.revive(["a"])
    (lease,) = await ledger.lease(admit())
    assert lease.age_s < 30.0
    assert (await ledger.get("a")).submitted_at == before.submitted_at
    assert await ledger.expire() == 0


async def test_a_finished_rollout_overruns_no_more(ledger, play):
    await play.submit("b", timeout_s=0.01)
    await play.submit("c", timeout_s=0.02)
    (lease, _) = await ledger.lease(admit())
    await ledger.complete(lease, make_group("b"))
    await until_expired(ledger)
    assert await play.state("b") == "ready"


@on_shared_stores
async def test_what_a_former_process_had_leased_is_not_waited_for(open_ledger):
    former = Play(await open_ledger("here/1"))
    await former.submit("a", "b")
    await former.lease(free=2)
    heir = await open_ledger("here/2")
    (lease, _) = await heir.lease(admit())
    assert (lease.rollout_id, lease.attempt) == ("a", 2)
    with pytest.raises(Fenced):
        await former.ledger.complete(former.leases["a"], make_group("a"))
    await heir.complete(lease, make_group("a"))
    await former.check()


@pytest.mark.parametrize("store", ["redis"], indirect=True)
@pytest.mark.parametrize("newcomer", ["there/2", "her/2", "here:1/2", "nowhere"])
async def test_what_others_have_leased_stays_theirs(open_ledger, newcomer: str):
    play = Play(await open_ledger("here/1"))
    await play.submit("a")
    await play.lease()
    await open_ledger(newcomer)
    assert await play.ledger.renew([play.leases["a"].key]) == set()


@on_shared_stores
async def test_leases_of_a_silent_owner_go_to_another(open_ledger):
    silent, other = await open_ledger("silent", lease_s=0.001), await open_ledger("other")
    play = Play(silent)
    await play.submit("a", "b")
    await play.lease(free=2)
    (kept,) = await other.lease(admit())
    assert await until_expired(other) == 1
    assert await other.renew([kept.key]) == set()
    (lease,) = await other.lease(admit())
    assert (lease.rollout_id, lease.attempt) == ("a", 2)
    zombie = play.leases["a"]
    assert await silent.renew([zombie.key]) == {zombie.key}
    for report in (silent.fail(zombie, "late"), silent.complete(zombie, make_group("a"))):
        with pytest.raises(Fenced):
            await report
    await other.complete(lease, make_group("a"))
    assert (await silent.get("a")).state == "ready"
    assert "'silent' was silent" in (await other.events("a"))[2].detail
    await play.check()


@on_shared_stores
async def test_a_renewed_lease_lasts(open_ledger):
    """Once a lease that began with it has ended, the renewed one holds."""
    owner, other = await open_ledger("owner", lease_s=0.001), await open_ledger("other", 60.0)
    play = Play(owner)
    await play.submit("renewed", "let-go")
    await play.lease()
    assert await other.renew([play.leases["renewed"].key]) == set()
    assert await until_expired(other) == 1
    assert await play.state("renewed") == "leased"


@on_shared_stores
async def test_two_owners_never_start_more_than_the_budget(open_ledger):
    owners = [await open_ledger(name) for name in ("one", "two")]
    play = Play(owners[0])
    await play.submit(*(f"r{number}" for number in range(40)), size=3, consumer="me")
    batches = await asyncio.gather(
        *(owners[n % 2].lease(admit(free=6, consumer="me", budget=50)) for n in range(20))
    )
    leased = [lease.rollout_id for batch in batches for lease in batch]
    assert len(leased) == len(set(leased)) == 16  # 48 of 50 trajectories
    assert (await owners[1].counts("me")).leased == 48
    await play.check()


@on_shared_stores
async def test_two_owners_see_one_another(open_ledger):
    one, two = await open_ledger("one"), await open_ledger("two")
    before = await two.revision()
    await Play(one).finish("a")
    assert await two.revision() > before
    assert ids(await two.deliver("d0", 1, "default", 0, None)) == ["a"]
    swaps = await asyncio.gather(
        *(one_of.compare_and_set("n", None, "x") for one_of in (one, two) * 8)
    )
    assert sum(swaps) == 1


async def test_rollouts_are_listed_newest_first_by_pages(ledger, play):
    names = [f"r{number}" for number in range(7)]
    await play.submit(*names)
    page = await ledger.find(limit=3)
    assert [entry.request.rollout_id for entry in page] == ["r6", "r5", "r4"]
    page = await ledger.find(limit=3, before="r4")
    assert [entry.request.rollout_id for entry in page] == ["r3", "r2", "r1"]
    page = await ledger.find(limit=3, before="r1")
    assert [entry.request.rollout_id for entry in page] == ["r0"]
    assert await ledger.find(before="r0") == []
    with pytest.raises(NotFound, match="before='z'"):
        await ledger.find(before="z")


async def test_rollouts_are_listed_by_state_and_consumer(ledger, play):
    async def found(**filters) -> list[str]:
        return [entry.request.rollout_id for entry in await ledger.find(**filters)]

    await in_every_open_state(play)
    await ledger.cancel(["other"], "reason")
    await play.submit("other-queued", consumer="you")
    for state in ("queued", "leased", "ready", "delivered", "consumed"):
        assert await found(state=state, consumer="me") == [state]
    assert await found(state="queued") == ["other-queued", "queued"]
    assert await found(state="queued", limit=1) == ["other-queued"]
    assert await found(consumer="you") == ["other-queued", "other"]
    assert await found(state="cancelled") == ["other"]
    assert await found(state="stale") == []
    assert await found(state="queued", before="other-queued") == ["queued"]


async def test_the_log_tells_every_transition(ledger, play):
    await play.finish("a", version=2)
    await play.deliver(version=3)
    await play.consume("a", step=7)
    log = await ledger.events("a")
    assert [(event.event, event.detail) for event in log] == [
        ("submit", None),
        ("lease", "attempt=1 version=2 owner=one"),
        ("complete", "oldest_version=2"),
        ("deliver", "version=3 oldest_version=2"),
        ("consume", "step=7"),
    ]
    assert [event.at for event in log] == sorted(event.at for event in log)
    assert (await ledger.get("a")).changed_at == pytest.approx(log[-1].at, abs=1e-5)


async def test_compaction_forgets_what_ended_and_the_audit_still_holds(ledger, play):
    await play.finish("safe", "unsafe", "given", version=1)
    await play.deliver(3, version=3)
    await play.consume("safe", step=0)
    await play.consume("unsafe", step=1, checkpoint_step=0)
    await play.submit("failed", "requeued")
    await play.lease()
    await ledger.requeue(play.leases["requeued"], "reason")
    await ledger.fail(play.leases["failed"], "reason")
    await play.lease()
    await ledger.drop_filtered(play.leases["requeued"], "reason", 0.0)
    await play.submit("queued")
    before, counts = await ledger.audit(), await ledger.counts()
    assert await ledger.compact(3600.0) == 0
    assert await ledger.compact(0.0) == 3
    assert await ledger.compact(0.0) == 0
    assert [await play.state(name) for name in ("safe", "failed", "requeued")] == [None] * 3
    assert await play.state("unsafe") == "consumed"  # it may be given back still
    assert await ledger.events("safe") == []
    assert await ledger.counts() == counts
    assert await ledger.audit() == before
    assert (before.max_staleness, before.requeues) == (2, 2)
    assert await ledger.give_back("default", step=-1) == 2
    listed = [entry.request.rollout_id for entry in await ledger.find()]
    assert listed == ["queued", "given", "unsafe"]
