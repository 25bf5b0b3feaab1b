"""Whole runs with real trainers over every transport, to the end and through crashes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.weight_sync import (
    CollectiveSync,
    DeltaConfig,
    DiskSync,
    HttpSync,
    SharedMemorySync,
    WeightSyncConfig,
)
from headway.launch.launchers.local import LocalRun
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.conftest import with_weight_sync
from tests.integration.driving import (
    START_S,
    finish,
    kill,
    resume,
    resumed,
    steps_of,
    until_steps,
)
from tests.integration.test_runs import BATCH
from tests.waiting import eventually

SHORT_RUN = ("test_a_killed_trainer_resumes_at_another_address[http-trainer_and_server]",)

MakeConfig = Callable[..., LaunchConfig]
Start = Callable[[LaunchConfig], LocalRun]
Connect = Callable[[str], RemoteInferenceEngine]
Sync = Callable[[str], WeightSyncConfig]


@pytest.fixture
def sync(tmp_path: Path) -> Iterator[Sync]:
    """Transports of this test, by name."""
    root = str(tmp_path / "weights")
    shared = Path(tempfile.mkdtemp(prefix="headway-test-", dir="/dev/shm"))
    known = {
        "http": HttpSync(root=root),
        "shared_memory": SharedMemorySync(root=str(shared / "weights")),
        "collective": CollectiveSync(),
        "ipc": CollectiveSync(backend="ipc"),
        "delta": DiskSync(root=root, dtype="bfloat16", delta=DeltaConfig(full_every=3)),
    }
    yield known.__getitem__
    shutil.rmtree(shared)


def check_run(config: LaunchConfig, client: RemoteInferenceEngine, steps: int) -> None:
    """Every step was done once, under a version of its own, and no trajectory was lost."""
    audit = client.audit()
    assert (audit.lost, audit.duplicated) == (0, 0)
    assert audit.counts.consumed == steps * BATCH
    rows = steps_of(config)
    assert [row["step"] for row in rows] == list(range(steps))
    versions = [row["version"] for row in rows]
    assert versions == sorted(set(versions))
    weights = client.weights()
    assert weights.committed is not None
    assert weights.committed.version == weights.head > versions[-1]


def manifests(config: LaunchConfig) -> list[Path]:
    """Of the versions that lie in the store, oldest first."""
    root = getattr(config.trainer.weight_sync, "root", None)
    return [] if root is None else sorted(Path(root).glob("v*/manifest.json"))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(("http", 1), ("shared_memory", 1), ("delta", 1), ("ipc", 1)),
        *(("collective", 1), ("collective", 2)),
    ],
)
def test_a_run_ends_well_over_every_transport(
    make_config: MakeConfig, start: Start, connect: Connect, sync: Sync, name: str, ranks: int
) -> None:
    config = with_weight_sync(make_config(steps=5, num_trainer_ranks=ranks), sync(name))
    run = start(config)
    run.start_trainer()
    finish(run)
    client = connect(run.url)
    check_run(config, client, steps=5)
    assert client.status().updates == 5
    assert steps_of(config)[0]["behaviour_kl"] < 1e-6
    # What serves is what was trained, also where the transport rounds: no further from it than that.
    assert max(step["behaviour_kl"] for step in steps_of(config)) < 0.05
    kinds = [json.loads(file.read_text())["kind"] for file in manifests(config)]
    deltas = [
        "full",
        "delta",
        "delta",
        "full",
        "delta",
    ]  # the third is kept, and so what it is based on
    assert kinds == {"delta": deltas, "collective": [], "ipc": []}.get(name, ["full"] * 3)


@pytest.mark.parametrize("name", ["http", "collective", "ipc"])
def test_a_run_survives_one_of_its_servers(
    make_config: MakeConfig, start: Start, connect: Connect, sync: Sync, name: str
) -> None:
    config = with_weight_sync(make_config(steps=8, num_servers=2), sync(name))
    run = start(config)
    run.start_trainer()
    eventually(lambda: len(steps_of(config)) >= 2, START_S, "2 steps are done")
    kill(run, "server-0")
    finish(run)
    client = connect(run.url)
    check_run(config, client, steps=8)
    committed = client.weights().committed
    assert committed is not None
    served = [(committed.version, committed.digest)] * 2
    eventually(
        lambda: (
            [(s.version, s.digest) for s in client.status().servers if s.state == "ready"] == served
        ),
        START_S,
        "the server that was started again serves what the other one serves",
    )


@pytest.mark.parametrize("with_server", [False, True], ids=["trainer", "trainer_and_server"])
@pytest.mark.parametrize("name", ["http", "collective"])
def test_a_killed_trainer_resumes_at_another_address(
    make_config: MakeConfig,
    start: Start,
    connect: Connect,
    sync: Sync,
    name: str,
    with_server: bool,
) -> None:
    config = with_weight_sync(make_config(steps=6), sync(name))
    run = start(config)
    run.start_trainer()
    until_steps(config, 3)
    kill(run, "trainer")
    client = connect(run.url)
    committed = client.weights().committed
    assert committed is not None
    if with_server:  # nobody holds the committed version any more
        kill(run, "server-0")
        run.watch()
    resume(run, config)
    check_run(config, client, steps=6)
    again = client.weights().committed
    assert again is not None
    assert again.path.rpartition("/")[0] != committed.path.rpartition("/")[0]


@pytest.mark.parametrize("way", ["rollback", "pin"])
def test_a_resumed_trainer_takes_the_next_free_number_whatever_serves(
    make_config: MakeConfig, start: Start, connect: Connect, way: str
) -> None:
    config = make_config(steps=6)
    run = start(config)
    run.start_trainer()
    until_steps(config, 3)
    kill(run, "trainer")
    client = connect(run.url)
    eventually(lambda: client.weights().publishing is None, 20, "what it published is over")
    head = client.weights().head
    assert (client.rollback if way == "rollback" else client.pin)(head - 1).head == head
    assert client.status().version == head - 1
    with resumed(run, config):
        eventually(lambda: client.weights().head > head, START_S, "it has published")
        if way == "pin":
            assert client.status().version == head - 1
            client.pin(None)
    check_run(config, client, steps=6)
    restored = [row["version"] for row in steps_of(config) if row["version"] > head]
    assert restored[0] == head + 1


def test_the_launcher_tells_servers_where_weights_come_from_and_with_which_token(
    make_config: MakeConfig,
    start: Start,
    sync: Sync,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEIGHTS_TOKEN", "a-secret-of-this-test")
    http = sync("http").model_copy(update={"token_env": "WEIGHTS_TOKEN"})
    config = with_weight_sync(make_config(steps=2), http)
    elsewhere = config.server.weights.model_copy(update={"allow": (str(tmp_path / "elsewhere"),)})
    server = config.server.model_copy(update={"weights": elsewhere})
    run = start(config.model_copy(update={"server": server}))
    given = yaml.safe_load((tmp_path / "run" / "configs" / "server-0.yaml").read_text())["weights"]
    assert given["allow"] == [str(tmp_path / "elsewhere"), "http://127.0.0.1:"]
    assert given["token_env"] == "WEIGHTS_TOKEN"
    run.start_trainer()
    finish(run)
