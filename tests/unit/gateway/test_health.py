"""Failures in a row are a quarantine; then one request tries."""

from __future__ import annotations

from gateway.fleet.health import Health


def test_only_failures_in_a_row_count():
    health = Health(max_failures=3, quarantine_s=10.0)
    for _ in range(5):
        assert not health.fail(0.0)
        assert not health.fail(0.0)
        health.succeed()
    assert health.admits(0.0)
    assert [health.fail(0.0) for _ in range(3)] == [False, False, True]
    assert health.is_quarantined
    assert not health.admits(9.9)


def test_one_request_tries_after_it():
    health = Health(1, 10.0)
    assert not health.begin()
    assert health.fail(0.0)
    assert health.admits(10.0)
    assert health.begin()
    assert not health.admits(11.0)
    health.end_trial()  # without a verdict, as when its caller went away
    assert health.admits(11.0)
    assert health.begin()
    health.succeed()
    health.end_trial()
    assert not health.is_quarantined
    assert health.admits(11.0)


def test_it_doubles_up_to_a_cap_and_a_success_ends_it():
    health, now, lengths = Health(1, 10.0), 0.0, []
    for _ in range(7):
        is_trial = health.begin()
        assert health.fail(now, is_trial)
        health.end_trial()
        assert health.until is not None
        lengths.append(health.until - now)
        now = health.until
    assert lengths == [10.0, 20.0, 40.0, 80.0, 160.0, 160.0, 160.0]
    health.begin()
    health.succeed()
    assert health.fail(now)
    assert health.until == now + 10.0


def test_what_was_sent_before_a_quarantine_does_not_prolong_it():
    health = Health(2, 10.0)
    sent = [health.begin() for _ in range(5)]
    assert [health.fail(float(n), is_trial) for n, is_trial in enumerate(sent)] == [
        False,
        True,
        False,
        False,
        False,
    ]
    assert health.until == 11.0
