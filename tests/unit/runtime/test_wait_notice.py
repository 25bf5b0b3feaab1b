"""Who waits says so now and then."""

from __future__ import annotations

from headway.runtime import wait_notice
from headway.runtime.wait_notice import WaitNotice


def test_a_wait_is_told_ever_more_seldom(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(wait_notice.time, "monotonic", lambda: now[0])
    notice = WaitNotice("the engine at http://h:1")
    for second in range(100):
        now[0] = float(second)
        notice.log_if_due("it refuses")
    assert caplog.messages == [
        f"waiting for the engine at http://h:1, {second} s" for second in (5, 10, 20, 40, 80)
    ]
    assert caplog.records[0].reason == "it refuses"
