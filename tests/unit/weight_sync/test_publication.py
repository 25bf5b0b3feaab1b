"""One version at a time, also where its upload goes on behind the next step."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from headway.contracts.errors import SyncError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from weight_sync.publication import Publication


class Service:
    """A rollout service and a publisher into it, which note what they are told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, PolicyVersion]] = []
        self.commit: Future[PolicyVersion] = Future()
        self.followed: PolicyVersion | None = None

    def update_weights(self, meta: WeightUpdateMeta) -> Future[PolicyVersion]:
        self.told.append(("update", meta.version))
        return self.commit

    def cancel_update(self, version: PolicyVersion, reason: str) -> PolicyVersion:
        self.told.append((f"cancel: {reason}", version))
        return version - 1

    def announce(self, version: PolicyVersion) -> WeightUpdateMeta:
        self.commit = Future()
        self.told.append(("announce", version))
        return WeightUpdateMeta(version, f"/w/{version}")

    def follow(self, version: PolicyVersion, decision: Future[PolicyVersion]) -> None:
        assert decision is self.commit
        self.followed = version

    def collect(self, committed: PolicyVersion, pinned: Any) -> list[PolicyVersion]:
        self.told.append(("collect", committed))
        return []


class Engine:
    """An `Uploader` with this result."""

    def __init__(self, answer: Future[None] | Exception | None) -> None:
        self.answer = answer

    def upload_weights(self, meta: WeightUpdateMeta | None) -> Future[None] | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def service() -> Iterator[Service]:
    yield Service()


def publication(engine: Any, service: Any) -> Publication:
    return Publication(engine, service, service, may_lag=True)


def done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


@pytest.mark.parametrize("answer", [None, done()], ids=["at once", "behind"])
def test_a_version_is_announced_uploaded_committed_and_old_ones_are_deleted(
    service: Service, answer: Future[None] | None
) -> None:
    made = publication(Engine(answer), service)
    made.begin(7)
    assert service.told == [("announce", 7), ("update", 7)]
    service.commit.set_result(7)
    made.finish()
    made.finish()
    assert service.told[2:] == [("collect", 7)]


def test_the_next_version_waits_for_the_one_before(service: Service) -> None:
    upload: Future[None] = Future()
    engine = Engine(upload)
    made = publication(engine, service)
    made.begin(7)
    service.commit.set_result(7)
    upload.set_result(None)
    engine.answer = None
    made.begin(8)
    assert [what for what, _ in service.told] == [
        *("announce", "update", "collect"),
        *("announce", "update"),
    ]


def test_an_upload_that_fails_behind_is_told_at_once_and_raised_when_it_is_waited_for(
    service: Service,
) -> None:
    upload: Future[None] = Future()
    made = publication(Engine(upload), service)
    made.begin(7)
    upload.set_exception(SyncError("the disk is full"))
    assert service.told[-1] == ("cancel: the disk is full", 7)
    with pytest.raises(SyncError, match="disk is full"):
        made.begin(8)
    assert ("announce", 8) not in service.told


def test_a_refusal_is_followed_by_the_publisher_and_is_what_is_raised(service: Service) -> None:
    upload: Future[None] = Future()
    made = publication(Engine(upload), service)
    made.begin(7)
    service.commit.set_exception(SyncError("no server is ready"))
    assert service.followed == 7
    upload.set_exception(SyncError("the version was refused"))
    with pytest.raises(SyncError, match="no server is ready") as raised:
        made.finish()
    assert "was refused" in str(raised.value.__cause__)


def test_an_upload_that_fails_at_once_is_raised_at_once(service: Service) -> None:
    made = publication(Engine(SyncError("a shard is gone")), service)
    with pytest.raises(SyncError, match="a shard is gone"):
        made.begin(7)
    assert service.told[-1][1] == 7
    made.finish()  # there is nothing to wait for


def test_ctrl_c_cancels_what_the_service_may_know_of(service, monkeypatch) -> None:
    def interrupted(meta: WeightUpdateMeta) -> Future[PolicyVersion]:
        raise KeyboardInterrupt

    monkeypatch.setattr(service, "update_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Publication(Engine(None), service, service).begin(5)
    assert service.told == [("announce", 5), ("cancel: its trainer was interrupted", 5)]
