"""Whoever is killed or stopped in a publication, in whatever state of it: a version serves whole or not
at all, the next one is published, and nobody who generates meanwhile notices more than a delay.

Processes stop themselves at the named states (`traps`), so that each case is exact. One fleet plays all
cases of a kind one after the other: what a case leaves behind is what the next one has to cope with.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from headway.contracts.config.gateway import FleetConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.config.weight_sync import (
    CollectiveSync,
    DiskSync,
    HttpSync,
    SharedMemorySync,
)
from headway.contracts.errors import Conflict, Fenced
from tests.integration.conftest import run_config
from tests.integration.fault_fleet import SERVERS, TOKENS, Fleet
from tests.integration.publishing_trainer import BUCKET, FORKS, MODULES, Outcome, Sync, Trainer

pytestmark = pytest.mark.timeout(180)

Victim = Literal["trainer", "server", "gateway", "servers", "everything"]
Fault = Literal["killed", "stopped"]

VICTIMS = {
    "trainer": ("trainer",),
    "server": ("server-1",),
    "gateway": ("gateway",),
    "servers": SERVERS,
    "everything": ("trainer", "gateway", *SERVERS),
}
STATES = {
    "announced": ("trainer", "announced"),
    "half_written": ("trainer", "half"),
    "without_manifest": ("trainer", "unmanifested"),
    "staged_on_one": ("server-1", "staged"),
    "prepared": ("gateway", "prepared"),
    "recorded": ("gateway", "recorded"),
    "one_of_two_committed": ("server-1", "swapping"),
    "committed_unheard": ("server-1", "swapped"),
}
"""Who stops itself there, and at which of its traps."""
COMMITTED = ("recorded", "one_of_two_committed", "committed_unheard")
"""From the record on, nothing takes it back."""
EARLY = ("announced", "half_written", "without_manifest")
"""There is no version yet."""
VOCABULARY = 14


def fault_config(folder: Path, model_dir: Path) -> LaunchConfig:
    """Two servers without a model, and deadlines of a few seconds."""
    config = run_config(folder, model_dir, num_servers=2)
    fleet = FleetConfig(lease_s=2.0, update_timeout_s=8.0, commit_timeout_s=2.0)
    backend = FakeBackendConfig(token_latency_s=0.01, vocab_size=VOCABULARY)
    weights = config.server.weights.model_copy(update={"stage_timeout_s": 2.0})
    return config.model_copy(
        update={
            "max_restarts": 1000,
            "gateway": config.gateway.model_copy(update={"fleet": fleet}),
            "server": config.server.model_copy(update={"backend": backend, "weights": weights}),
        }
    )


class Stage:
    """A fleet for case after case; one that a case has left broken is replaced."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self._folder = folder
        self._model_dir = model_dir
        self._memory = Path(tempfile.mkdtemp(prefix="headway-faults-", dir="/dev/shm"))
        self._fleet: Fleet | None = None
        self._num_fleets = 0
        self.syncs: dict[str, Sync] = {
            "disk": DiskSync(root=str(folder / "disk"), shard_bytes=BUCKET),
            "http": HttpSync(root=str(folder / "http"), shard_bytes=BUCKET),
            "shared_memory": SharedMemorySync(root=str(self._memory), shard_bytes=BUCKET),
            "collective": CollectiveSync(shard_bytes=BUCKET, timeout_s=3.0),
        }

    def fleet(self) -> Fleet:
        if self._fleet is not None and not self._fleet.is_whole:
            self._end()
        if self._fleet is None:
            self._num_fleets += 1
            folder = self._folder / f"fleet-{self._num_fleets}"
            folder.mkdir()
            origins = tuple(sync.origin for sync in self.syncs.values())
            self._fleet = Fleet(fault_config(folder, self._model_dir), folder, origins)
        return self._fleet

    def disk(self, name: str) -> DiskSync:
        """The disk of another machine."""
        return DiskSync(root=str(self._folder / "disk" / name), shard_bytes=BUCKET)

    def close(self) -> None:
        self._end()
        shutil.rmtree(self._memory)

    def _end(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stage]:
    FORKS.set_forkserver_preload(MODULES)
    stage = Stage(tmp_path_factory.mktemp("faults"), model_dir)
    yield stage
    stage.close()


def play(fleet: Fleet, sync: Sync, victim: Victim, fault: Fault, state: str) -> None:
    """Bring a publication into a state, strike, and see that everything goes on."""
    with fleet.case():
        before = fleet.committed()
        traffic = fleet.traffic()
        first = reach(fleet, sync, state)
        strike(fleet, first, victim, fault, STATES[state][0])
        is_known = fault == "stopped" or "trainer" not in VICTIMS[victim]
        if is_known:
            first.outcome()
        first.end()
        recover(fleet, sync)
        kept = {record.version for record in fleet.kept()}
        if state in COMMITTED:
            assert first.version in kept
        if state in EARLY and not is_known:
            assert first.digest not in fleet.sightings.digests[first.version]
        for versions in traffic.end():
            assert len(versions) == TOKENS
            assert versions == sorted(versions)
            assert set(versions) <= kept | {before}
            assert versions[0] >= before
        audit = fleet.client.audit()
        assert (audit.lost, audit.duplicated, audit.counts.failed) == (0, 0, 0)


def reach(fleet: Fleet, sync: Sync, state: str) -> Trainer:
    """A publication in this state."""
    holder, point = STATES[state]
    fleet.traps(holder).set(point)
    trainer = fleet.train(sync)
    assert trainer.version > fleet.committed()
    fleet.until_stopped(holder)
    if state == "one_of_two_committed":
        fleet.until(lambda: fleet.served("server-0").version == trainer.version, "one committed")
    return trainer


def strike(fleet: Fleet, first: Trainer, victim: Victim, fault: Fault, holder: str) -> None:
    if fault == "killed":
        fleet.kill(*VICTIMS[victim])
        fleet.go_on(holder)
        return
    [name] = VICTIMS[victim]
    fleet.stop(name)
    if holder != name:
        fleet.go_on(holder)
    until_given_up(fleet, name, first)
    fleet.go_on(name)


def until_given_up(fleet: Fleet, name: str, first: Trainer) -> None:
    """Everybody else has gone on without who is stopped."""
    if name == "trainer":
        fleet.until(lambda: fleet.client.weights().publishing is None, "the version is given up")
    elif name == "gateway":
        # A server generates for longer than a lease.
        assert len(fleet.generate(fleet.url("server-0"), 250).output_tokens) == 250
    else:
        first.outcome()
        fleet.until(lambda: fleet.state(name) == "lost", f"{name} is lost")


def recover(fleet: Fleet, sync: Sync) -> None:
    """The next trainer publishes, and exactly its weights serve."""
    trainer = fleet.train(sync)
    assert trainer.outcome() == Outcome()
    see_served(fleet, trainer)
    trainer.end()


def see_served(fleet: Fleet, trainer: Trainer) -> None:
    """These very weights on all servers, and nothing else under any number."""
    fleet.until_served(trainer)
    for name in SERVERS:
        fleet.check_held(name, trainer)
    fleet.check_sightings()
    assert fleet.generate(fleet.run.url, 8).version_runs == [(trainer.version, 0, 8)]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("fault", ["killed", "stopped"])
@pytest.mark.parametrize("victim", ["trainer", "server", "gateway"])
def test_disk(stage: Stage, victim: Victim, fault: Fault, state: str) -> None:
    play(stage.fleet(), stage.syncs["disk"], victim, fault, state)


@pytest.mark.parametrize(
    ("victim", "state"),
    [("servers", "half_written"), ("everything", "half_written"), ("everything", "recorded")],
)
def test_disk_at_once(stage: Stage, victim: Victim, state: str) -> None:
    play(stage.fleet(), stage.syncs["disk"], victim, "killed", state)


@pytest.mark.parametrize(
    ("victim", "fault"),
    [("trainer", "killed"), ("server", "killed"), ("server", "stopped"), ("gateway", "killed")],
)
@pytest.mark.parametrize("transport", ["http", "shared_memory", "collective"])
def test_other_transports_half_way(
    stage: Stage, transport: str, victim: Victim, fault: Fault
) -> None:
    play(stage.fleet(), stage.syncs[transport], victim, fault, "half_written")


def test_a_gateway_that_comes_back_in_an_upload_waits_for_its_servers(stage: Stage) -> None:
    """Until they have reported, it cannot know that nobody is there to agree."""
    fleet, sync = stage.fleet(), stage.syncs["disk"]
    with fleet.case():
        before = fleet.committed()
        fleet.traps("trainer").shut("half")
        first = fleet.train(sync)
        fleet.until(lambda: fleet.traps("trainer").is_waited_at("half"), "half is written")
        for name in SERVERS:
            fleet.stop(name)
        fleet.kill("gateway")
        fleet.until(lambda: fleet.client.weights().publishing == first.version, "asked again")
        for name in SERVERS:
            fleet.go_on(name)
        fleet.until(lambda: len(fleet.ready()) == len(SERVERS), "both servers are ready")
        fleet.kill("trainer")
        assert fleet.committed() == before
        recover(fleet, sync)


def test_an_older_incarnation_that_wakes_up_is_fenced(stage: Stage) -> None:
    """Its successor has published other weights under the same number, at another place."""
    fleet = stage.fleet()
    with fleet.case():
        old = reach(fleet, stage.disk("old"), "half_written")
        new = fleet.train(stage.disk("new"))
        assert new.outcome() == Outcome()
        assert (new.version, new.digest) != (old.version, old.digest)
        assert new.version == old.version
        old.go_on()
        assert old.outcome().error == Fenced.code
        see_served(fleet, new)
        old.end()
        new.end()
        recover(fleet, stage.syncs["disk"])


def test_a_second_publisher_is_refused(stage: Stage) -> None:
    fleet = stage.fleet()
    with fleet.case():
        first = fleet.train(stage.syncs["disk"])
        assert first.outcome() == Outcome()
        second = fleet.train(stage.disk("second"), "second", name="second")
        assert second.outcome().error == Conflict.code
        see_served(fleet, first)
        first.end()
        second.end()


def test_what_a_dead_trainer_has_staged_is_not_taken_for_its_successor_s(stage: Stage) -> None:
    """Gateway and trainer die; servers have a version staged, and hear of its number from elsewhere."""
    fleet = stage.fleet()
    with fleet.case():
        old = reach(fleet, stage.disk("dead"), "prepared")
        fleet.kill("trainer", "gateway")
        new = fleet.train(stage.disk("successor"))
        assert new.outcome() == Outcome()
        assert new.version == old.version
        see_served(fleet, new)
        old.end()
        new.end()
