"""Processes are killed or stopped in each state of a publication: a version serves whole or not
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
from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig, FakeBackendConfig
from headway.contracts.config.weight_sync import (
    CollectiveSync,
    DiskSync,
    HttpSync,
    SharedMemorySync,
)
from headway.contracts.errors import Conflict, Fenced
from headway.launch.quickstart import task
from tests.integration.conftest import run_config
from tests.integration.fault_fleet import SERVERS, TOKENS, Fleet, Misled
from tests.integration.publishing_trainer import BUCKET, Outcome, Sync, Trainer
from tests.processes import local_run
from weight_sync.model_dir import load_model

SHORT_RUN = (
    "test_disk[trainer-killed-half_written]",
    "test_disk[server-killed-one_of_two_committed]",
    "test_disk[gateway-killed-recorded]",
    "test_other_transports_half_way[collective-trainer-killed]",
    "test_an_older_incarnation_that_wakes_up_is_fenced",
    "test_a_second_publisher_is_refused",
)

Victim = Literal["trainer", "server", "other_server", "gateway", "servers", "everything"]
Fault = Literal["killed", "stopped"]

VICTIMS = {
    "trainer": ("trainer",),
    "server": ("server-1",),
    "other_server": ("server-0",),
    "gateway": ("gateway",),
    "servers": SERVERS,
    "everything": ("trainer", "gateway", *SERVERS),
}
STATES = {
    "announced": ("trainer", "announced"),
    "half_written": ("trainer", "half"),
    "without_manifest": ("trainer", "unmanifested"),
    "staged_unheard": ("server-1", "staged"),
    "prepared": ("gateway", "prepared"),
    "recorded": ("gateway", "recorded"),
    "one_of_two_committed": ("server-1", "swapping"),
    "committed_unheard": ("server-1", "swapped"),
}
"""Who stops itself there, and at which of its traps."""
COMMITTED = ("recorded", "one_of_two_committed", "committed_unheard")
"""From the record on, nothing takes it back."""
OF_SERVERS = ("staged_unheard", "committed_unheard")
"""A server alone knows."""
EARLY = ("announced", "half_written", "without_manifest")
"""There is no version yet."""
VOCABULARY = 14


def fault_config(folder: Path, model_dir: Path) -> LaunchConfig:
    """Two servers without a model, and deadlines of a few seconds."""
    config = run_config(folder, model_dir, num_servers=2)
    fleet = FleetConfig(lease_s=2.0, update_timeout_s=8.0, commit_timeout_s=2.0)
    backend = FakeBackendConfig(token_latency_s=0.01, vocab_size=VOCABULARY)
    weights = config.server.weights.model_copy(update={"stage_timeout_s": 3.0})
    return config.model_copy(
        update={
            "max_restarts": 1000,
            "gateway": config.gateway.model_copy(update={"fleet": fleet}),
            "server": config.server.model_copy(update={"backend": backend, "weights": weights}),
        }
    )


class Stage:
    """A fleet for case after case; one that a case has left broken is replaced."""

    def __init__(self, folder: Path, model_dir: Path, memory: Path, has_model: bool) -> None:
        self._folder = folder
        self._model_dir = model_dir
        self._has_model = has_model
        self._fleet: Fleet | None = None
        self._num_fleets = 0
        self.syncs: dict[str, Sync] = {
            "disk": self.disk("main"),
            "http": HttpSync(root=str(folder / "http"), shard_bytes=BUCKET),
            "shared_memory": SharedMemorySync(root=str(memory), shard_bytes=BUCKET),
            "collective": CollectiveSync(shard_bytes=BUCKET, timeout_s=3.0),
            "ipc": CollectiveSync(backend="ipc", shard_bytes=BUCKET, timeout_s=3.0),
        }

    def fleet(self) -> Fleet:
        if self._fleet is not None and not self._fleet.is_whole:
            self.close()
        if self._fleet is None:
            self._num_fleets += 1
            folder = self._folder / f"fleet-{self._num_fleets}"
            config = self.config(folder)
            if self._has_model:
                server = config.server.model_copy(update={"backend": EmbeddedTorchConfig()})
                config = config.model_copy(update={"server": server})
            origins = (str(self._folder), *(sync.origin for sync in self.syncs.values()))
            model_dir = str(self._model_dir) if self._has_model else None
            self._fleet = Fleet(config, folder, origins, model_dir)
        return self._fleet

    def config(self, folder: Path) -> LaunchConfig:
        """Of another run."""
        folder.mkdir()
        return fault_config(folder, self._model_dir)

    def disk(self, name: str) -> DiskSync:
        """That of another machine."""
        return DiskSync(root=str(self._folder / "disk" / name), shard_bytes=BUCKET)

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="headway-faults-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def stage(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, memory: Path
) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("faults"), model_dir, memory, has_model=False)
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def model_stage(tmp_path_factory: pytest.TempPathFactory, memory: Path) -> Iterator[Stage]:
    """With a model of several buckets."""
    scratch, folder = tmp_path_factory.mktemp("scratch"), tmp_path_factory.mktemp("faults")
    task.write_model(scratch, {})
    model = load_model(ModelConfig(path=str(scratch), init_from_scratch=True))
    model.save_pretrained(scratch)
    stage = Stage(folder, scratch, memory, has_model=True)
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
            assert first.digest not in fleet.shared_reports.digests[first.version]
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
    committed = fleet.committed()  # now: the gateway may be the one that stops
    trainer = fleet.train(sync)
    assert trainer.version > committed
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
        if fleet.model_dir is not None:
            fleet.check_tokens(name, trainer)
    fleet.check_sightings()
    assert fleet.generate(fleet.run.url, 8).version_runs == [(trainer.version, 0, 8)]


@pytest.mark.parametrize("state", [state for state in STATES if state not in OF_SERVERS])
@pytest.mark.parametrize("fault", ["killed", "stopped"])
@pytest.mark.parametrize("victim", ["trainer", "server", "gateway"])
def test_disk(stage: Stage, victim: Victim, fault: Fault, state: str) -> None:
    play(stage.fleet(), stage.syncs["disk"], victim, fault, state)


@pytest.mark.parametrize(
    ("victim", "fault", "state"),
    [
        ("server", "killed", "staged_unheard"),
        ("server", "stopped", "staged_unheard"),
        ("gateway", "killed", "staged_unheard"),
        ("server", "killed", "committed_unheard"),
        ("server", "stopped", "committed_unheard"),
        ("gateway", "killed", "committed_unheard"),
        ("other_server", "killed", "one_of_two_committed"),
        ("other_server", "stopped", "one_of_two_committed"),
    ],
)
def test_disk_and_servers(stage: Stage, victim: Victim, fault: Fault, state: str) -> None:
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
@pytest.mark.parametrize("transport", ["http", "shared_memory", "collective", "ipc"])
def test_other_transports_half_way(
    stage: Stage, transport: str, victim: Victim, fault: Fault
) -> None:
    play(stage.fleet(), stage.syncs[transport], victim, fault, "half_written")


@pytest.mark.parametrize("state", ["recorded", "one_of_two_committed"])
def test_what_flowed_is_served_also_when_its_gateway_dies(stage: Stage, state: str) -> None:
    """It lies nowhere, but the servers have it staged: they need no other publication."""
    fleet = stage.fleet()
    with fleet.case():
        first = reach(fleet, stage.syncs["collective"], state)
        fleet.kill("gateway")
        fleet.go_on(STATES[state][0])
        assert first.outcome() == Outcome()
        see_served(fleet, first)
        first.end()


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
        assert new.digest != old.digest
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


def test_a_second_gateway_by_mistake_gets_no_hold_over_the_servers(
    stage: Stage, tmp_path: Path
) -> None:
    """It publishes to servers of another one, in the middle of that one's publication."""
    fleet, other = stage.fleet(), local_run(stage.config(tmp_path / "other"))
    first = reach(fleet, stage.disk("first"), "prepared")
    other.start_gateway()
    misled = Misled(fleet, other.url)
    try:
        misled.start()
        stray = fleet.train(stage.disk("stray"), "stray", url=other.url, after=1000)
        assert stray.outcome() == Outcome()
        stray_facts = (stray.version, stray.digest)
        fleet.until(
            lambda: {(s.version, s.digest) for s in map(fleet.served, SERVERS)} == {stray_facts},
            "the servers obey the other gateway, which came later",
        )
    finally:
        misled.end()
        other.stop()
    fleet.go_on("gateway")
    assert first.outcome() == Outcome()
    fleet.until_served(first)
    for name in SERVERS:
        fleet.check_held(name, first)
    fleet.check_digests()
    # Numbers went back and forth, so no other case is played on this fleet.


@pytest.mark.parametrize(
    ("victim", "fault", "state"),
    [
        ("trainer", "killed", "half_written"),
        ("server", "killed", "one_of_two_committed"),
    ],
)
def test_greedy_tokens_are_those_of_the_weights_that_serve(
    model_stage: Stage, victim: Victim, fault: Fault, state: str
) -> None:
    play(model_stage.fleet(), model_stage.syncs["disk"], victim, fault, state)
