import pytest

from headway.runtime.staleness import StalenessBound


@pytest.mark.parametrize(
    ("batch_size", "max_staleness", "version", "outstanding", "capacity"),
    [
        # (η + v + 1)·B - (accepted + running), worked by hand, for a consumer that began at version 0
        (4, 0, 0, 0, 4),  # synchronous: one batch ahead
        (4, 0, 0, 4, 0),
        (4, 0, 1, 4, 4),  # the next version opens the next batch
        (4, 2, 0, 0, 12),
        (4, 2, 3, 20, 4),
        (4, 2, 3, 24, 0),
        (32, 4, 10, 480, 0),
        (4, 0, 0, 6, -2),  # a smaller budget than what is out already
    ],
)
def test_the_budget_is_the_formula(batch_size, max_staleness, version, outstanding, capacity):
    bound = StalenessBound(batch_size, max_staleness, base=0)
    assert bound.budget(version) - outstanding == capacity


@pytest.mark.parametrize("version", [0, 3, 100])
@pytest.mark.parametrize("consumed", [0, 12, 4096])
def test_a_consumer_that_attaches_gets_as_much_whatever_it_consumed_before(version, consumed):
    base = StalenessBound.base_of(version, 4, consumed)
    bound = StalenessBound(batch_size=4, max_staleness=2, base=base)
    assert bound.budget(version) - consumed == 12
    assert bound.budget(version + 1) - consumed == 16
