import pytest

from headway.runtime.staleness import StalenessController, StalenessSnapshot


def controller(max_concurrent=100, batch_size=4, max_staleness=1, version=0, accepted=0):
    made = StalenessController(max_concurrent)
    made.attach(batch_size, max_staleness, StalenessSnapshot(version, accepted))
    return made


@pytest.mark.parametrize(
    ("max_concurrent", "batch_size", "max_staleness", "version", "accepted", "running", "capacity"),
    [
        # (η + v + 1)·B - (accepted + running), worked by hand
        (100, 4, 0, 0, 0, 0, 4),  # synchronous: one batch ahead
        (100, 4, 0, 0, 1, 3, 0),
        (100, 4, 0, 1, 4, 0, 4),  # the next version opens the next batch
        (100, 4, 2, 0, 0, 0, 12),
        (100, 4, 2, 3, 12, 8, 4),
        (100, 4, 2, 3, 24, 0, 0),
        (100, 32, 4, 10, 400, 80, 0),
        # max_concurrent - running
        (8, 4, 2, 0, 0, 0, 8),
        (8, 4, 2, 0, 0, 6, 2),
        (8, 4, 2, 5, 20, 8, 0),
        # a smaller budget than what is out already: negative, nothing starts
        (100, 4, 0, 0, 6, 0, -2),
    ],
)
def test_capacity_is_the_formula(
    max_concurrent, batch_size, max_staleness, version, accepted, running, capacity
):
    made = controller(max_concurrent, batch_size, max_staleness, version, accepted)
    for index in range(running):
        made.start(f"r{index}", 1)
    assert made.capacity() == capacity
    assert made.free() == max_concurrent - running
    assert made.running == running


def test_without_a_consumer_only_concurrency_bounds():
    made = StalenessController(max_concurrent=10, version=3)
    assert (made.capacity(), made.max_staleness, made.version) == (10, None, 3)
    made.start("r0", 8)
    assert made.capacity() == made.free() == 2
    assert not made.has_due_running()


def test_an_accepted_group_keeps_its_place():
    made = controller(batch_size=4, max_staleness=0)
    made.start("r0", 4)
    assert made.capacity() == 0
    made.accept("r0")
    assert made.capacity() == 0
    assert made.running == 0


def test_a_released_group_returns_its_capacity():
    made = controller(batch_size=4, max_staleness=0)
    made.start("r0", 4)
    made.release("r0")
    assert made.capacity() == 4


def test_a_dropped_group_returns_its_capacity():
    made = controller(batch_size=4, max_staleness=0)
    made.start("r0", 4)
    made.accept("r0")
    made.drop(4)
    assert made.capacity() == 4


def test_a_new_version_opens_one_batch():
    made = controller(batch_size=4, max_staleness=1, accepted=8)
    assert made.capacity() == 0
    made.set_version(1)
    assert made.capacity() == 4


def test_rollouts_of_others_share_concurrency_but_not_the_budget():
    made = controller(max_concurrent=10, batch_size=4, max_staleness=0)
    made.start("other", 7, is_bounded=False)
    assert made.free() == 3
    assert made.capacity() == 3
    made.accept("other")
    assert made.capacity() == 4
    made.start("mine", 4)
    made.start("other", 2, is_bounded=False)
    assert (made.capacity(), made.free()) == (0, 4)


def test_a_group_is_due_once_only_the_next_batch_may_take_it():
    made = controller(batch_size=4, max_staleness=2, version=5, accepted=20)
    made.start("r0", 1)
    for version, is_due in ((5, False), (6, False), (7, True), (8, True)):
        made.set_version(version)
        assert made.has_due_running() is is_due
    made.accept("r0")
    assert not made.has_due_running()


def test_synchronous_groups_are_due_at_once():
    made = controller(max_staleness=0)
    made.start("r0", 1)
    assert made.has_due_running()


def test_an_unbounded_group_is_never_due():
    made = controller(max_staleness=0)
    made.start("r0", 1, is_bounded=False)
    made.set_version(9)
    assert not made.has_due_running()


def test_a_group_that_started_before_its_consumer_attached_is_bounded_from_then():
    made = StalenessController(100)
    made.start("mine", 3, is_bounded=False)
    made.start("other", 1, is_bounded=False)
    made.attach(4, 0, StalenessSnapshot(0, 0))
    made.mark_bounded("mine")
    made.mark_bounded("finished long ago")
    assert made.capacity() == 1
    made.accept("mine")
    assert made.capacity() == 1


def test_a_snapshot_restores_version_and_accepted_together():
    made = controller(batch_size=4, max_staleness=1, version=3, accepted=12)
    made.start("r0", 4)
    made.accept("r0")
    snapshot = made.snapshot()
    assert snapshot == StalenessSnapshot(version=3, accepted=16)
    restored = StalenessController(100)
    restored.attach(4, 1, snapshot)
    assert restored.capacity() == made.capacity() == 4


def test_detach_lifts_the_bound():
    made = controller(max_concurrent=10, batch_size=1, max_staleness=0, accepted=5)
    assert made.capacity() == -4
    made.detach()
    assert made.capacity() == 10
    assert made.max_staleness is None
    assert made.snapshot().accepted == 0


@pytest.mark.parametrize("end", ["accept", "release"])
def test_a_group_ends_once(end):
    made = controller()
    made.start("r0", 1)
    getattr(made, end)("r0")
    with pytest.raises(KeyError):
        getattr(made, end)("r0")
