import pytest

from gateway.ledger.records import Delivery
from headway.contracts.codec import decode_groups
from headway.contracts.errors import Conflict, NotFound, RolloutsFailed
from headway.contracts.types import TrajectoryGroup
from tests.unit.gateway.ledger_suite import ids
from tests.unit.gateway.rollout_builders import make_trajectory


async def test_a_batch_is_delivered_whole_and_oldest_first(play):
    await play.submit("a", "b", "c")
    await play.lease()
    await play.complete("c", "b")
    assert await play.deliver(3) == Delivery(None, num_ready=2, dropped=0)
    await play.complete("a")
    assert ids(await play.deliver(2)) == ["a", "b"]
    assert await play.deliver(2, "d1") == Delivery(None, num_ready=1, dropped=0)
    assert ids(await play.deliver(1, "d2")) == ["c"]


async def test_the_payload_is_the_group(play):
    await play.finish("a", size=3, version=7)
    (group,) = decode_groups((await play.deliver()).payloads[0])
    assert [row.trajectory_id for row in group.trajectories] == ["a/0", "a/1", "a/2"]
    assert group.oldest_version == 7


async def test_a_payload_of_megabytes_comes_back_whole(ledger, play):
    await play.submit("a")
    await play.lease()
    row = make_trajectory("a", versions=[3] * 200_000)
    await ledger.complete(play.leases["a"], TrajectoryGroup("a", "g-a", (row,)))
    (group,) = decode_groups((await play.deliver()).payloads[0])
    assert group.trajectories[0].num_tokens == 200_001


async def test_the_same_delivery_is_answered_again(ledger, play):
    await play.finish("a", "b", "c")
    first = await play.deliver(2, "d0")
    again = await play.deliver(2, "d0")
    assert again.payloads == first.payloads
    assert ids(await play.deliver(1, "d1")) == ["c"]
    await play.consume("a", "b", step=0)
    assert (await play.deliver(2, "d0")).payloads == first.payloads


async def test_a_delivery_id_is_not_for_others(ledger, play):
    await play.finish("a", "b")
    await play.deliver(1, "d0")
    with pytest.raises(Conflict, match="delivery 'd0' gave out other groups"):
        await play.deliver(1, "d0", consumer="someone")
    with pytest.raises(Conflict, match="delivery 'd0' gave out other groups"):
        await ledger.deliver_exactly("d0", ["b"], 0)


async def test_a_forgotten_delivery_is_refused(play):
    await play.finish("a", "b")
    await play.deliver(1, "d0")
    await play.consume("a", step=0, checkpoint_step=0)
    with pytest.raises(Conflict, match="'d0' was consumed and checkpointed"):
        await play.deliver(1, "d0")


async def test_a_consumer_receives_its_own_rollouts_only(play):
    await play.finish("a", consumer="you")
    await play.finish("b", consumer="me")
    assert await play.deliver(2, consumer="me") == Delivery(None, num_ready=1, dropped=0)
    assert ids(await play.deliver(1, consumer="me")) == ["b"]


async def test_exactly_these_whoever_submitted_them(ledger, play):
    await play.finish("a", "b", consumer="you")
    await play.finish("c", consumer="me")
    delivery = await ledger.deliver_exactly("d0", ["c", "a", "c"], 0)
    assert ids(delivery) == ["a", "c"]
    again = await ledger.deliver_exactly("d0", ["c", "a"], 0)
    assert again.payloads == delivery.payloads


async def test_exactly_these_waits_for_all(ledger, play):
    await play.finish("a")
    await play.submit("b")
    assert await ledger.deliver_exactly("d0", ["a", "b"], 0) == Delivery(None, 1, 0)
    await play.lease()
    await play.complete("b")
    assert ids(await ledger.deliver_exactly("d0", ["a", "b"], 0)) == ["a", "b"]


async def test_exactly_these_raises_for_what_can_never_come(ledger, play):
    with pytest.raises(NotFound, match="'z' was never submitted"):
        await ledger.deliver_exactly("d0", ["z"], 0)
    await play.submit("a", "f", "c")
    await play.lease()
    await ledger.fail(play.leases["a"], "the verifier hung")
    await ledger.drop_filtered(play.leases["f"], "too easy", 1.0)
    await ledger.cancel(["c"], "not needed")
    for rollout_id, told in [
        ("a", "failed: the verifier hung"),
        ("f", "filtered: too easy"),
        ("c", "cancelled: not needed"),
    ]:
        with pytest.raises(RolloutsFailed, match=f"'{rollout_id}' is {told}"):
            await ledger.deliver_exactly("d0", [rollout_id], 0)
    await play.finish("b")
    with pytest.raises(RolloutsFailed) as caught:
        await ledger.deliver_exactly("d0", ["b", "c", "a"], 0)
    assert caught.value.message == (
        "rollout 'c' is cancelled: not needed; rollout 'a' is failed: the verifier hung"
    )
    await play.deliver(1, "d1")
    with pytest.raises(Conflict, match="'b' was given out before"):
        await ledger.deliver_exactly("d2", ["b"], 0)


async def test_a_refusal_names_so_many_and_counts_the_rest(ledger, play):
    names = [f"r{n}" for n in range(20)]
    await play.submit(*names)
    await ledger.cancel(names, "no" * 4000)
    with pytest.raises(RolloutsFailed, match=r"'r15' is cancelled: (no){2000}; and 4 more$"):
        await ledger.deliver_exactly("d0", names, 0)


async def test_what_is_too_stale_is_dropped_and_counted(ledger, play):
    await play.finish("old", size=3, version=1)
    await play.finish("new", size=2, version=2)
    delivery = await play.deliver(1, version=4, max_staleness=2)
    assert (ids(delivery), delivery.dropped) == (["new"], 3)
    counts = await ledger.counts()
    assert (counts.stale, counts.delivered) == (3, 2)
    with pytest.raises(RolloutsFailed, match="'old' is stale: version 4 is too far from version 1"):
        await ledger.deliver_exactly("d1", ["old"], 4)


async def test_stale_groups_are_dropped_even_if_the_batch_is_not_full(play):
    await play.finish("old", size=3, version=0)
    assert await play.deliver(2, version=4, max_staleness=2) == Delivery(None, 0, dropped=3)
    assert await play.deliver(2, version=4, max_staleness=2) == Delivery(None, 0, dropped=0)


async def test_what_is_too_stale_for_weights_that_do_not_serve_yet_is_dropped(ledger, play):
    await play.submit("slow")
    await play.lease(version=3)
    await play.finish("old", size=3, version=2)
    await play.finish("new", version=3)
    delivery = await play.deliver(1, "d0", version=4, max_staleness=2, learner=5)
    assert (ids(delivery), delivery.dropped) == (["new"], 3)
    assert delivery.given == ((2, 2),)
    await play.finish("newer", version=5)
    # What was admitted for the last of these versions holds nothing back: the next batch may take it.
    assert ids(await play.deliver(1, "d1", version=4, max_staleness=2, learner=5)) == ["newer"]
    await play.consume("new", step=5)
    assert (await ledger.audit()).max_staleness == 2


async def test_a_learner_behind_what_serves_changes_nothing(play):
    await play.finish("old", version=1)
    await play.finish("new", version=2)
    delivery = await play.deliver(1, version=4, max_staleness=2, learner=3)
    assert (ids(delivery), delivery.dropped) == (["new"], 2)


async def test_without_a_bound_nothing_is_stale(play):
    await play.finish("old", version=0)
    assert ids(await play.deliver(1, version=99, max_staleness=None)) == ["old"]


async def test_a_batch_is_held_back_for_what_only_it_can_consume(ledger, play):
    await play.submit("slow", "slower")
    await play.lease(version=1)
    await play.finish("late", version=2)
    await play.finish("quick", version=2)
    assert ids(await play.deliver(1, "d0", version=2, max_staleness=2)) == ["late"]
    held = await play.deliver(1, "d1", version=3, max_staleness=2)
    assert held == Delivery(None, num_ready=1, dropped=0, is_held_back=True)
    await play.complete("slow", version=1)
    assert (await play.deliver(1, "d1", version=3, max_staleness=2)).is_held_back
    assert ids(await play.deliver(1, "d2", version=3, max_staleness=None)) == ["slow"]
    await ledger.fail(play.leases["slower"], "it comes no more")
    assert ids(await play.deliver(1, "d1", version=3, max_staleness=2)) == ["quick"]


async def test_others_are_not_held_back(play):
    await play.submit("slow", consumer="you")
    await play.lease(version=1)
    await play.finish("quick", version=3, consumer="me")
    assert ids(await play.deliver(1, consumer="me", version=3, max_staleness=2)) == ["quick"]


async def test_what_would_be_too_stale_next_goes_first_in_the_order_of_submission(play):
    await play.submit("a", "b", "c", "d")
    await play.lease()
    await play.complete("a", "c", version=3)
    await play.complete("b", "d", version=2)
    assert ids(await play.deliver(3, "d0", version=3, max_staleness=1)) == ["a", "b", "d"]
    assert ids(await play.deliver(1, "d1", version=4, max_staleness=1)) == ["c"]


async def test_staleness_of_what_was_consumed_is_audited(ledger, play):
    await play.finish("a", version=3)
    await play.finish("b", version=4)
    await play.deliver(2, version=5, max_staleness=2)
    assert (await ledger.audit()).max_staleness == 0
    await play.consume("b", step=5)
    assert (await ledger.audit()).max_staleness == 1
    await play.consume("a", step=5)
    assert (await ledger.audit()).max_staleness == 2


async def test_consume_is_idempotent_within_a_step(ledger, play):
    await play.finish("a", "b")
    await play.deliver(2)
    await play.consume("a", "b", "a", step=3)
    await play.consume("a", "b", step=3)
    assert (await ledger.counts()).consumed == 4
    assert (await ledger.get("a")).step == 3


async def test_another_step_cannot_consume_again(ledger, play):
    await play.finish("a", "b")
    await play.deliver(2)
    await play.consume("a", step=3)
    with pytest.raises(Conflict, match=r"'a' is consumed\(3\); consume needs"):
        await play.consume("b", "a", step=4)
    counts = await ledger.counts()
    assert (counts.consumed, counts.delivered) == (2, 2)


async def test_only_what_was_delivered_is_consumed(play):
    await play.finish("a")
    with pytest.raises(Conflict, match="'a' is ready; consume needs"):
        await play.consume("a")
    with pytest.raises(NotFound):
        await play.consume("z")


async def test_a_checkpoint_forgets_the_payloads_of_its_consumers(ledger, play):
    await play.finish("a", "b", consumer="me")
    await play.finish("c", consumer="you")
    await play.deliver(2, "d0", consumer="me")
    await play.deliver(1, "d1", consumer="you")
    await play.consume("c", step=0)
    await play.consume("a", step=0)
    await play.consume("b", step=1, checkpoint_step=0)
    kept = {name: (await ledger.get(name, with_payload=True)).payload for name in "abc"}
    assert kept["a"] is None
    assert kept["b"] is not None
    assert kept["c"] is not None


async def test_after_a_crash_the_consumer_gets_back_what_its_checkpoint_lacks(ledger, play):
    await play.finish("a", "b", "c", "d", "e")
    for step, name in enumerate("abc"):
        await play.deliver(1, f"d{step}")
        await play.consume(name, step=step)
    await play.deliver(1, "d3")
    assert await ledger.give_back("default", step=0) == 3  # b, c consumed later; d delivered
    counts = await ledger.counts()
    assert (counts.consumed, counts.ready, counts.delivered) == (2, 8, 0)
    assert ids(await play.deliver(4, "d0-again")) == ["b", "c", "d", "e"]
    await play.consume("b", "c", step=1)


async def test_giving_back_twice_gives_nothing_more(ledger, play):
    await play.finish("a")
    await play.deliver()
    assert await ledger.give_back("someone", step=-1) == 0
    assert await ledger.give_back("default", step=-1) == 1
    assert await ledger.give_back("default", step=-1) == 0


async def test_a_delivery_that_was_given_back_is_not_answered_from_memory(ledger, play):
    await play.finish("a", "b")
    await play.deliver(1, "d0")
    await ledger.give_back("default", step=-1)
    assert ids(await play.deliver(2, "d0")) == ["a", "b"]


async def test_what_only_an_older_checkpoint_lacks_is_played_again(ledger, play):
    """The payload went with the newer checkpoint; if that one is lost, the prompt is not."""
    await play.finish("a", "b")
    await play.deliver(2)
    await play.consume("a", step=0)
    await play.consume("b", step=1, checkpoint_step=1)
    assert await ledger.give_back("default", step=-1) == 2
    assert sorted(await play.lease()) == ["a", "b"]
    assert play.leases["a"].attempt == 1
    await play.complete("a", "b", version=5)
    assert ids(await play.deliver(2, "d1", version=5)) == ["a", "b"]
    assert await play.log("a") == [
        *("submit", "lease", "complete", "deliver", "consume"),
        *("replay", "lease", "complete", "deliver"),
    ]
