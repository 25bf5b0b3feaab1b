import pytest
from rollout_builders import make_group, make_request

from headway.contracts.codec import decode_groups
from headway.contracts.errors import Conflict, NotFound, WorkflowError
from headway.rollout.ledger.base import Delivery


def ids(delivery: Delivery) -> list[str]:
    assert delivery.payloads is not None
    return [group.rollout_id for payload in delivery.payloads for group in decode_groups(payload)]


async def test_a_batch_is_delivered_whole_and_oldest_first(play, ledger):
    await play.submit("a", "b", "c")
    await play.lease_all()
    await ledger.complete(make_group("c"))
    await ledger.complete(make_group("b"))
    assert await play.deliver(3) == Delivery(None, num_ready=2, dropped=0)
    await ledger.complete(make_group("a"))
    assert ids(await play.deliver(2)) == ["a", "b"]
    assert await play.deliver(2, "d1") == Delivery(None, num_ready=1, dropped=0)
    assert ids(await play.deliver(1, "d2")) == ["c"]


async def test_the_payload_is_the_group(play, ledger):
    await play.finish("a", size=3, version=7)
    (group,) = decode_groups((await play.deliver()).payloads[0])
    assert [row.trajectory_id for row in group.trajectories] == ["a/0", "a/1", "a/2"]
    assert group.oldest_version == 7


async def test_the_same_delivery_is_answered_again(play, ledger):
    await play.finish("a", "b", "c")
    first = await play.deliver(2, "d0")
    again = await play.deliver(2, "d0")
    assert again.payloads == first.payloads
    assert ids(await play.deliver(1, "d1")) == ["c"]
    await ledger.consume(["a", "b"], step=0, checkpoint_step=-1)
    assert (await play.deliver(2, "d0")).payloads == first.payloads


async def test_a_consumer_receives_its_own_rollouts_only(play):
    await play.finish("a", consumer="you")
    await play.finish("b", consumer="me")
    assert await play.deliver(2, consumer="me") == Delivery(None, num_ready=1, dropped=0)
    assert ids(await play.deliver(1, consumer="me")) == ["b"]


async def test_exactly_these_whoever_submitted_them(play):
    await play.finish("a", "b", consumer="you")
    await play.finish("c", consumer="me")
    delivery = await play.deliver(2, consumer="me", rollout_ids=["c", "a"])
    assert sorted(ids(delivery)) == ["a", "c"]
    again = await play.deliver(2, consumer="me", rollout_ids=["c", "a"])
    assert sorted(again.payloads) == sorted(delivery.payloads)


async def test_exactly_these_waits_for_all(play, ledger):
    await play.finish("a")
    await play.submit("b")
    assert await play.deliver(2, rollout_ids=["a", "b"]) == Delivery(None, 1, 0)
    await play.lease_all()
    await ledger.complete(make_group("b"))
    assert ids(await play.deliver(2, rollout_ids=["a", "b"])) == ["a", "b"]


async def test_exactly_these_raises_for_what_can_never_come(play, ledger):
    with pytest.raises(NotFound, match="'z' was never submitted"):
        await play.deliver(1, rollout_ids=["z"])
    await play.submit("a")
    await play.lease_all()
    await ledger.fail("a", "the verifier hung")
    with pytest.raises(WorkflowError, match="'a' is failed: the verifier hung"):
        await play.deliver(1, rollout_ids=["a"])
    await play.finish("b")
    await play.deliver(1, "d1")
    with pytest.raises(Conflict, match="'b' was given out before"):
        await play.deliver(1, "d2", rollout_ids=["b"])


async def test_what_is_too_stale_is_dropped_and_counted(play, ledger):
    await play.finish("old", size=3, version=1)
    await play.finish("new", size=2, version=2)
    delivery = await play.deliver(1, version=4, max_staleness=2)
    assert (ids(delivery), delivery.dropped) == (["new"], 3)
    counts = await ledger.counts()
    assert (counts.stale, counts.delivered) == (3, 2)
    with pytest.raises(WorkflowError, match="'old' is stale"):
        await play.deliver(1, "d1", rollout_ids=["old"])


async def test_stale_groups_are_dropped_even_if_the_batch_is_not_full(play):
    await play.finish("old", size=3, version=0)
    assert await play.deliver(2, version=4, max_staleness=2) == Delivery(None, 0, dropped=3)
    assert await play.deliver(2, version=4, max_staleness=2) == Delivery(None, 0, dropped=0)


async def test_without_a_bound_nothing_is_stale(play):
    await play.finish("old", version=0)
    assert ids(await play.deliver(1, version=99, max_staleness=None)) == ["old"]


async def test_staleness_of_what_was_consumed_is_audited(play, ledger):
    await play.finish("a", version=3)
    await play.finish("b", version=4)
    await play.deliver(2, version=5, max_staleness=2)
    assert (await ledger.audit()).max_staleness == 0
    await ledger.consume(["b"], 5, -1)
    assert (await ledger.audit()).max_staleness == 1
    await ledger.consume(["a"], 5, -1)
    assert (await ledger.audit()).max_staleness == 2


async def test_consume_is_idempotent_within_a_step(play, ledger):
    await play.finish("a", "b")
    await play.deliver(2)
    await ledger.consume(["a", "b"], step=3, checkpoint_step=-1)
    await ledger.consume(["a", "b"], step=3, checkpoint_step=-1)
    audit = await ledger.audit()
    assert (audit.counts.consumed, audit.duplicated, audit.lost) == (4, 0, 0)


async def test_another_step_cannot_consume_again(play, ledger):
    await play.finish("a", "b")
    await play.deliver(2)
    await ledger.consume(["a"], step=3, checkpoint_step=-1)
    with pytest.raises(Conflict):
        await ledger.consume(["b", "a"], step=4, checkpoint_step=-1)
    counts = await ledger.counts()
    assert (counts.consumed, counts.delivered) == (2, 2)


async def test_only_what_was_delivered_is_consumed(play, ledger):
    await play.finish("a")
    with pytest.raises(Conflict, match="'a' is ready; consume needs"):
        await ledger.consume(["a"], step=0, checkpoint_step=-1)
    with pytest.raises(NotFound):
        await ledger.consume(["z"], step=0, checkpoint_step=-1)


async def test_after_a_crash_the_consumer_gets_back_what_its_checkpoint_lacks(play, ledger):
    await play.finish("a", "b", "c", "d", "e")
    for step, name in enumerate("abc"):
        await play.deliver(1, f"d{step}", version=0)
        await ledger.consume([name], step=step, checkpoint_step=-1)
    await play.deliver(1, "d3")
    assert await ledger.give_back("default", step=0) == 3  # b, c consumed later; d delivered
    counts = await ledger.counts()
    assert (counts.consumed, counts.ready, counts.delivered) == (2, 8, 0)
    assert ids(await play.deliver(4, "d0-again")) == ["b", "c", "d", "e"]
    await ledger.consume(["b", "c"], step=1, checkpoint_step=-1)
    audit = await ledger.audit()
    assert (audit.lost, audit.duplicated) == (0, 0)


async def test_giving_back_twice_gives_nothing_more(play, ledger):
    await play.finish("a")
    await play.deliver()
    assert await ledger.give_back("someone", step=-1) == 0
    assert await ledger.give_back("default", step=-1) == 1
    assert await ledger.give_back("default", step=-1) == 0


async def test_a_delivery_that_was_given_back_is_not_answered_from_memory(play, ledger):
    await play.finish("a", "b")
    await play.deliver(1, "d0")
    await ledger.give_back("default", step=-1)
    assert ids(await play.deliver(2, "d0")) == ["a", "b"]


async def test_what_only_an_older_checkpoint_lacks_is_played_again(play, ledger):
    """The payload went with the newer checkpoint; if that one is lost, the prompt is not."""
    await play.finish("a", "b")
    await play.deliver(2)
    await ledger.consume(["a"], step=0, checkpoint_step=-1)
    await ledger.consume(["b"], step=1, checkpoint_step=1)
    assert await ledger.give_back("default", step=-1) == 2
    assert sorted(await play.lease_all()) == ["a", "b"]
    for name in "ab":
        await ledger.complete(make_group(name, version=5))
    assert ids(await play.deliver(2, "d1", version=5)) == ["a", "b"]
    audit = await ledger.audit()
    assert (audit.lost, audit.duplicated) == (0, 0)


async def test_cancel_ends_what_is_not_consumed(play, ledger):
    await play.finish("consumed", "delivered", "ready", consumer="me")
    await play.deliver(2, consumer="me")
    await ledger.consume(["consumed"], step=0, checkpoint_step=0)
    await play.submit("queued", consumer="me")
    await play.submit("other", consumer="you")
    assert await ledger.cancel("me") == 6
    counts = await ledger.counts("me")
    assert (counts.consumed, counts.cancelled, counts.submitted) == (2, 6, 8)
    assert (await ledger.counts("you")).queued == 2
    assert await play.lease_all() == ["other"]
    assert await ledger.cancel("me") == 0
    with pytest.raises(WorkflowError, match="'queued' is cancelled"):
        await play.deliver(1, "d9", rollout_ids=["queued"])
    assert await ledger.submit([make_request("queued", consumer="me")], 10**6) == [False]
