import pytest
from rollout_builders import make_group, make_request

from headway.contracts.errors import Conflict, NotFound, QueueFull
from headway.rollout.ledger.base import LeaseLimits

ALL = 10**6


def limits(consumer: str | None = "me", bounded: int = ALL, free: int = ALL) -> LeaseLimits:
    return LeaseLimits(consumer, bounded, free)


async def test_submit_is_idempotent(ledger):
    assert await ledger.submit([make_request("a"), make_request("b")], ALL) == [True, True]
    assert await ledger.submit([make_request("b"), make_request("c")], ALL) == [False, True]
    assert await ledger.submit([make_request("d"), make_request("d")], ALL) == [True, False]
    assert (await ledger.counts()).queued == 8


async def test_submit_stays_idempotent_after_the_rollout_moved_on(ledger, play):
    await play.finish("a")
    assert await ledger.submit([make_request("a")], ALL) == [False]
    assert (await ledger.counts()).ready == 2


async def test_other_content_under_a_known_id_stores_nothing(ledger):
    await ledger.submit([make_request("a")], ALL)
    with pytest.raises(Conflict, match="'a' was submitted before with other content"):
        await ledger.submit([make_request("b"), make_request("a", size=3)], ALL)
    assert (await ledger.counts()).submitted == 2


async def test_a_full_queue_stores_nothing(ledger):
    await ledger.submit([make_request("a", size=3)], max_queued=4)
    with pytest.raises(QueueFull, match=r"5 trajectories would wait, executor.max_queued=4"):
        await ledger.submit([make_request("b", size=2)], max_queued=4)
    assert (await ledger.counts()).submitted == 3
    assert await ledger.submit([make_request("c", size=1)], max_queued=4) == [True]


async def test_a_full_queue_still_answers_for_known_ids(ledger):
    await ledger.submit([make_request("a", size=4)], max_queued=4)
    assert await ledger.submit([make_request("a", size=4)], max_queued=1) == [False]


async def test_leased_rollouts_do_not_fill_the_queue(ledger, play):
    await play.submit("a", size=4)
    await play.lease_all()
    assert await ledger.submit([make_request("b", size=4)], max_queued=4) == [True]


async def test_the_lease_carries_the_whole_request(ledger):
    request = make_request("a")
    await ledger.submit([request], ALL)
    lease = await ledger.lease(limits(None), 0)
    assert (lease.request, lease.attempt) == (request, 1)
    assert await ledger.lease(limits(None), 0) is None


async def test_leases_go_out_in_submission_order(ledger, play):
    await play.submit("b", "a", "c")
    assert await play.lease_all() == ["b", "a", "c"]


async def test_the_head_waits_until_its_group_fits(ledger, play):
    await play.submit("large", size=8)
    await play.submit("small", size=1)
    assert await ledger.lease(limits(None, free=7), 0) is None
    assert (await ledger.lease(limits(None, free=8), 0)).request.rollout_id == "large"


async def test_negative_limits_lease_nothing(ledger, play):
    await play.submit("a", consumer="me")
    assert await ledger.lease(limits(bounded=-3, free=0), 0) is None


async def test_neither_line_blocks_the_other(ledger, play):
    await play.submit("mine", consumer="me")
    await play.submit("other", consumer="someone")
    lease = await ledger.lease(limits(bounded=0), 0)
    assert lease.request.rollout_id == "other"
    lease = await ledger.lease(limits(free=0), 0)
    assert lease.request.rollout_id == "mine"


async def test_both_lines_together_keep_submission_order(ledger, play):
    for index, consumer in enumerate(["you", "me", "me", "you"]):
        await play.submit(f"r{index}", consumer=consumer)
    order = [(await ledger.lease(limits(), 0)).request.rollout_id for _ in range(4)]
    assert order == ["r0", "r1", "r2", "r3"]


async def test_a_requeued_rollout_keeps_its_place(ledger, play):
    await play.submit("a", "b", "c")
    assert (await ledger.lease(limits(), 0)).request.rollout_id == "a"
    assert (await ledger.lease(limits(), 0)).request.rollout_id == "b"
    await ledger.requeue("b", "the server went away")
    await ledger.requeue("a", "the server went away")
    lease = await ledger.lease(limits(), 0)
    assert (lease.request.rollout_id, lease.attempt) == ("a", 2)
    assert (await ledger.lease(limits(), 0)).request.rollout_id == "b"
    assert (await ledger.lease(limits(), 0)).request.rollout_id == "c"
    assert (await ledger.audit()).requeues == 4


@pytest.mark.parametrize("event", ["complete", "fail", "requeue"])
async def test_an_attempt_ends_once(ledger, play, event):
    async def end(rollout_id: str) -> None:
        if event == "complete":
            await ledger.complete(make_group(rollout_id))
        else:
            await getattr(ledger, event)(rollout_id, "reason")

    await play.submit("a")
    with pytest.raises(Conflict, match=f"'a' is queued; {event} needs"):
        await end("a")
    await play.lease_all()
    await end("a")
    with pytest.raises(Conflict):
        await end("a")
    with pytest.raises(NotFound, match="no rollout 'z'"):
        await end("z")
    audit = await ledger.audit()
    assert (audit.lost, audit.duplicated) == (0, 0)


async def test_counts_are_disjoint_and_cover_all(ledger, play):
    await play.finish("ready", "delivered", "consumed", size=1)
    await play.deliver(3)
    await ledger.consume(["consumed"], step=0, checkpoint_step=-1)
    await ledger.give_back("default", 0)
    await play.deliver(1, "d1", rollout_ids=["delivered"])
    await play.submit("failed", size=4)
    await play.lease_all()
    await ledger.fail("failed", "reason")
    await play.submit("leased", size=8)
    await play.lease_all()
    await play.finish("stale", size=32, consumer="late")
    await play.deliver(1, "d2", consumer="late", version=9, max_staleness=1)
    await play.submit("cancelled", size=64, consumer="gone")
    await ledger.cancel("gone")
    await play.submit("queued", size=16)
    counts = await ledger.counts()
    assert counts.model_dump() == {
        "submitted": 1 + 1 + 1 + 4 + 8 + 16 + 32 + 64,
        "ready": 1,
        "delivered": 1,
        "consumed": 1,
        "failed": 4,
        "leased": 8,
        "queued": 16,
        "stale": 32,
        "cancelled": 64,
    }
    assert (await ledger.counts("gone")).submitted == 64
    assert (await ledger.counts("nobody")).submitted == 0
    audit = await ledger.audit()
    assert (audit.counts, audit.lost, audit.duplicated) == (counts, 0, 0)


async def test_notes_are_kept_and_replaced(ledger):
    assert await ledger.get_note("key") is None
    await ledger.put_note("key", "one")
    await ledger.put_note("key", "twö")
    await ledger.put_note("other", "")
    assert await ledger.get_note("key") == "twö"
    assert await ledger.get_note("other") == ""
