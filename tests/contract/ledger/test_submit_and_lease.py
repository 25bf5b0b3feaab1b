import pytest

from headway.contracts.errors import Conflict, Fenced, QueueFull
from headway.contracts.types import VersionBounds
from tests.unit.gateway.ledger_suite import ALL, admit
from tests.unit.gateway.rollout_builders import make_group, make_request


async def test_submit_is_idempotent(ledger, play):
    assert await ledger.submit([make_request("a"), make_request("b")], ALL) == [True, True]
    assert await ledger.submit([make_request("b"), make_request("c")], ALL) == [False, True]
    assert await ledger.submit([make_request("d"), make_request("d")], ALL) == [True, False]
    assert (await ledger.counts()).queued == 8


async def test_submit_stays_idempotent_after_the_rollout_moved_on(ledger, play):
    await play.finish("a")
    assert await ledger.submit([make_request("a")], ALL) == [False]
    assert (await ledger.counts()).ready == 2


@pytest.mark.parametrize("known_before", [True, False])
async def test_other_content_under_a_known_id_stores_nothing(ledger, play, known_before):
    requests = [make_request("b"), make_request("a", size=3)]
    if known_before:
        await ledger.submit([make_request("a")], ALL)
    else:
        requests.insert(0, make_request("a"))
    with pytest.raises(Conflict, match="'a' was submitted before with other content"):
        await ledger.submit(requests, ALL)
    assert (await ledger.counts()).submitted == 2 * known_before


async def test_a_full_queue_stores_nothing(ledger, play):
    await ledger.submit([make_request("a", size=3)], max_queued=4)
    with pytest.raises(QueueFull, match=r"5 trajectories would wait, executor.max_queued=4"):
        await ledger.submit([make_request("b", size=2)], max_queued=4)
    assert (await ledger.counts()).submitted == 3
    assert await ledger.submit([make_request("c", size=1)], max_queued=4) == [True]


async def test_a_consumer_has_a_bound_of_its_own(ledger, play):
    await ledger.submit([make_request("a", 3, consumer="me")], ALL, max_queued_per_consumer=4)
    with pytest.raises(QueueFull, match=r"5 trajectories of consumer 'me' would wait"):
        await ledger.submit([make_request("b", 2, consumer="me")], ALL, max_queued_per_consumer=4)
    await ledger.submit([make_request("b", 4, consumer="you")], ALL, max_queued_per_consumer=4)
    assert (await ledger.counts()).queued == 7


async def test_a_full_queue_still_answers_for_known_ids(ledger, play):
    await ledger.submit([make_request("a", size=4)], max_queued=4)
    assert await ledger.submit([make_request("a", size=4)], 1, 1) == [False]


async def test_leased_rollouts_do_not_fill_the_queue(ledger, play):
    await play.submit("a", size=4)
    await play.lease()
    assert await ledger.submit([make_request("b", size=4)], max_queued=4) == [True]


async def test_the_lease_carries_the_whole_request(ledger, play):
    request = make_request("a", priority=3, timeout_s=60.0)
    await ledger.submit([request], ALL)
    (lease,) = await ledger.lease(admit())
    assert (lease.request, lease.attempt) == (request, 1)
    assert 0 <= lease.age_s < 60
    assert await ledger.lease(admit()) == []


async def test_leases_go_out_in_submission_order(play):
    await play.submit("b", "a", "c")
    assert await play.lease() == ["b", "a", "c"]


async def test_a_higher_priority_goes_first(play):
    await play.submit("first", "second")
    await play.submit("urgent", priority=5, consumer="me")
    await play.submit("lowest", priority=-1000)
    await play.submit("more-urgent", priority=1000, consumer="you")
    order = ["more-urgent", "urgent", "first", "second", "lowest"]
    assert await play.lease(consumer="me", free=7) == order[:3]
    assert await play.lease(consumer="me") == order[3:]


async def test_the_head_waits_until_its_group_fits(play):
    await play.submit("large", size=8)
    await play.submit("small", size=1)
    assert await play.lease(free=7) == []
    assert await play.lease(free=8) == ["large"]


async def test_a_lease_takes_as_many_as_fit(play):
    await play.submit("a", "b", "c", "d", size=2)
    assert await play.lease(free=5) == ["a", "b"]
    assert await play.lease(free=2) == ["c"]


async def test_negative_limits_lease_nothing(play):
    await play.submit("a", consumer="me")
    assert await play.lease(free=-1) == []
    assert await play.lease(free=0) == []
    assert await play.lease(consumer="me", budget=-3) == []
    assert await play.lease(consumer="me", budget=2) == ["a"]


async def test_neither_line_blocks_the_other(play):
    await play.submit("mine", size=2, consumer="me")
    await play.submit("other", size=4, consumer="someone")
    assert await play.lease(consumer="me", free=3) == ["mine"]
    assert await play.lease(consumer="me", budget=2) == ["other"]


async def test_both_lines_together_keep_submission_order(play):
    for index, consumer in enumerate(["you", "me", "me", "he", "you"]):
        await play.submit(f"r{index}", consumer=consumer)
    assert await play.lease(consumer="me") == ["r0", "r1", "r2", "r3", "r4"]


async def test_what_the_consumer_holds_counts_against_its_budget(ledger, play):
    await play.finish("consumed", "delivered", consumer="me")
    await play.deliver(2, consumer="me")
    await play.consume("consumed")
    await play.finish("ready", consumer="me")
    await play.submit("leased", "queued", "last", consumer="me")
    assert await play.lease(consumer="me", budget=7) == []
    assert await play.lease(consumer="me", budget=8) == ["leased"]
    assert await play.lease(consumer="me", budget=9) == []
    await ledger.fail(play.leases["leased"], "its budget comes back")
    assert await play.lease(consumer="me", budget=8) == ["queued"]
    await ledger.drop_filtered(play.leases["queued"], "and here", 0.0)
    assert await play.lease(consumer="me", budget=8) == ["last"]


async def test_what_waits_for_a_version_blocks_nobody(play):
    await play.submit("later", versions=VersionBounds(min_version=3), priority=9)
    await play.submit("now")
    assert await play.lease(version=2) == ["now"]
    assert await play.lease(version=3) == ["later"]


async def test_a_requeued_rollout_keeps_its_place(ledger, play):
    await play.submit("a", "b", "c")
    assert await play.lease(free=4) == ["a", "b"]
    await ledger.requeue(play.leases["b"], "the server went away")
    await ledger.requeue(play.leases["a"], "the server went away")
    assert await play.lease() == ["a", "b", "c"]
    assert [play.leases[name].attempt for name in "abc"] == [2, 2, 1]
    assert (await ledger.audit()).requeues == 4
    assert (await ledger.get("a")).reason == "the server went away"


async def end(ledger, lease, event: str) -> None:
    if event == "complete":
        await ledger.complete(lease, make_group(lease.rollout_id))
    elif event == "drop_filtered":
        await ledger.drop_filtered(lease, "reason", 0.5)
    else:
        await getattr(ledger, event)(lease, "reason")


ENDS = {"complete": "ready", "drop_filtered": "filtered", "fail": "failed", "requeue": "queued"}


@pytest.mark.parametrize("event", ENDS)
async def test_an_attempt_ends_once_however_often_it_is_told(ledger, play, event):
    await play.submit("a")
    await play.lease()
    lease = play.leases["a"]
    for _ in range(2):
        await end(ledger, lease, event)
        assert await play.state("a") == ENDS[event]
    assert len(await play.log("a")) == 3
    for other in ENDS.keys() - {event}:
        with pytest.raises(Fenced, match=f"'a' has ended .the rollout is {ENDS[event]} now"):
            await end(ledger, lease, other)
    assert await play.state("a") == ENDS[event]


@pytest.mark.parametrize("event", ENDS)
async def test_an_older_attempt_is_fenced(ledger, play, event):
    await play.submit("a")
    await play.lease()
    old = play.leases["a"]
    await ledger.requeue(old, "first")
    await play.lease()
    assert play.leases["a"].key != old.key
    with pytest.raises(Fenced):
        await end(ledger, old, event)
    assert await play.state("a") == "leased"


async def test_a_completed_group_is_told_of(ledger, play):
    await play.finish("a", size=3, version=4)
    entry = await ledger.get("a", with_payload=True)
    assert (entry.state, entry.oldest_version, entry.mean_reward) == ("ready", 4, 1.0)
    assert entry.payload == (await play.deliver(version=6)).payloads[0]
    entry = await ledger.get("a")
    assert (entry.payload, entry.staleness, entry.attempt) == (None, 2, 1)
    assert entry.submitted_at <= entry.changed_at


async def test_a_filtered_group_is_told_of(ledger, play):
    await play.submit("a")
    await play.lease()
    await ledger.drop_filtered(play.leases["a"], "all rewards are equal", 0.25)
    entry = await ledger.get("a")
    assert (entry.state, entry.reason) == ("filtered", "all rewards are equal")
    assert entry.mean_reward == 0.25


async def test_counts_are_disjoint_and_cover_all(ledger, play):
    await play.finish("ready", "delivered", "consumed", size=1)
    await play.deliver(3)
    await play.consume("consumed")
    await ledger.give_back("default", 0)
    await ledger.deliver_exactly("d1", ["delivered"], 0)
    await play.submit("failed", size=4)
    await play.lease()
    await ledger.fail(play.leases["failed"], "reason")
    await play.submit("filtered", size=128)
    await play.lease()
    await ledger.drop_filtered(play.leases["filtered"], "reason", 0.0)
    await play.submit("leased", size=8)
    await play.lease()
    await play.finish("stale", size=32, consumer="late")
    await play.deliver(1, "d2", consumer="late", version=9, max_staleness=1)
    await play.submit("cancelled", size=64, consumer="gone")
    await ledger.cancel_all("gone", "gone")
    await play.submit("queued", size=16)
    counts = await ledger.counts()
    assert counts.model_dump() == {
        "submitted": 1 + 1 + 1 + 4 + 8 + 16 + 32 + 64 + 128,
        "ready": 1,
        "delivered": 1,
        "consumed": 1,
        "failed": 4,
        "leased": 8,
        "queued": 16,
        "stale": 32,
        "cancelled": 64,
        "filtered": 128,
    }
    assert (await ledger.counts("gone")).submitted == 64
    assert (await ledger.counts("nobody")).submitted == 0
    assert await ledger.outstanding("default") == 3
    assert await ledger.outstanding("nobody") == 0


async def test_every_change_moves_the_revision(ledger, play):
    seen = [await ledger.revision()]

    async def moved() -> bool:
        seen.append(await ledger.revision())
        return seen[-1] > seen[-2]

    await play.submit("a")
    assert await moved()
    await play.lease()
    assert await moved()
    await play.complete("a")
    assert await moved()
    await play.deliver()
    assert await moved()
    await ledger.set_value("key", "value")
    assert await moved()
    await ledger.counts()
    await play.lease()
    await play.deliver(5, "d1")
    assert not await moved()


async def test_notes_are_kept_and_replaced(ledger):
    assert await ledger.get_value("key") is None
    await ledger.set_value("key", "one")
    await ledger.set_value("key", "twö")
    await ledger.set_value("other", "")
    assert await ledger.get_value("key") == "twö"
    assert await ledger.get_value("other") == ""


async def test_a_note_is_swapped_by_who_knew_it(ledger):
    assert not await ledger.compare_and_set("key", "", "one")
    assert await ledger.compare_and_set("key", None, "one")
    assert not await ledger.compare_and_set("key", None, "two")
    assert not await ledger.compare_and_set("key", "three", "two")
    assert await ledger.compare_and_set("key", "one", "two")
    assert await ledger.get_value("key") == "two"


async def test_an_unknown_rollout_is_nothing(ledger):
    assert await ledger.get("nobody") is None
    assert await ledger.events("nobody") == []
