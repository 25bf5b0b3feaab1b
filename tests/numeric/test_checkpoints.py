"""Checkpoints under `kill -9`, on full disks, and while training goes on."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.errors import ConfigError, StateError
from tests.numeric.engines import (
    assert_close,
    open_engine,
    parameters_of,
    random_batch,
    token_loss,
    tokens_in_loss,
)
from tests.numeric.models import save_model
from tests.numeric.ranks import DEADLINE_S, run_ranks, start_ranks
from trainer.api import MicroBatchSpec, SaveLoadMeta
from trainer.batching.balance import partition_by_tokens
from trainer.checkpoint import CheckpointContents, Checkpoints, RunState
from trainer.topology import Topology

pytestmark = pytest.mark.extended

ALONE = Topology(0, 1, torch.device("cpu"))
NEVER = (0, 0)
AT_ONCE = 4  # processes that die at the same time
# What changes or reads names on disk; writes to open files, and their fsync, lie in between.
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def checkpoints_in(folder: Path, topology: Topology = ALONE, asynchronous: bool = True):
    return Checkpoints(folder, RecoveryConfig(keep=1, asynchronous=asynchronous), topology)


def parts_of(engine) -> CheckpointContents:
    return CheckpointContents({"model": engine})


def train_step(engine, topology: Topology, step: int) -> None:
    batch = random_batch(step)
    mine = batch.select(partition_by_tokens(batch.lengths, topology.world_size)[topology.rank])
    engine.train_batch(mine, MicroBatchSpec(40), token_loss, tokens_in_loss)
    engine.step_lr_scheduler()


def watch(root: Path, act: Callable[[str, Path], None]) -> None:
    """Call `act` before every operation of this process on a file below `root`; for good."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in OPERATIONS and isinstance(args[0], str | bytes | os.PathLike):
            path = Path(os.fsdecode(args[0]))
            if path.is_relative_to(root):
                act(event, path)

    sys.addaudithook(hook)


def save_twice(
    topology: Topology, model_dir: Path, folder: Path, death: tuple[int, int], asynchronous: bool
) -> dict[str, Any]:
    """Checkpoints of steps 1 and 2; a rank dies before its n-th operation of the second.

    Args:
        death: rank and n; n = 0 lets all live.
    Returns:
        What each checkpoint held, and this rank's number of operations.
    """
    engine = open_engine(model_dir, topology=topology)
    checkpoints = checkpoints_in(folder, topology, asynchronous)
    train_step(engine, topology, 0)
    checkpoints.save(parts_of(engine), RunState("run", step=1))
    checkpoints.finish()
    held = [parameters_of(engine)]
    train_step(engine, topology, 1)
    held.append(parameters_of(engine))
    told = os.open(folder / f"told-{topology.rank}", os.O_CREAT | os.O_WRONLY)
    operations = 0

    def count(event: str, path: Path) -> None:
        nonlocal operations
        operations += 1
        os.pwrite(told, bytes([checkpoints.safe_step + 1]), 0)  # as the ledger could be told now
        if death == (topology.rank, operations):
            os.kill(os.getpid(), signal.SIGKILL)

    watch(folder / "checkpoints", count)
    checkpoints.save(parts_of(engine), RunState("run", step=2))
    train_step(engine, topology, 2)
    checkpoints.finish()
    return {"held": held, "operations": operations}


@dataclass
class Deaths:
    """Dies at every operation, a few processes at a time."""

    world_size: int
    asynchronous: bool
    model_dir: Path
    scratch: Path

    def whole(self) -> list[dict[str, Any]]:
        """What a run without a death held, by rank."""
        folder = self._folder(NEVER)
        arguments = (self.model_dir, folder, NEVER, self.asynchronous)
        return run_ranks(self.world_size, folder / "ranks", save_twice, *arguments)

    def die(self, deaths: list[tuple[int, int]]) -> None:
        while deaths:
            now, deaths = deaths[:AT_ONCE], deaths[AT_ONCE:]
            runs = {death: self._start(death) for death in now}
            for (rank, _), processes in runs.items():
                assert wait([processes[rank].sentinel], DEADLINE_S)
                processes[rank].join()
                assert processes[rank].exitcode == -signal.SIGKILL
                for process in processes:
                    process.kill()
                    process.join()

    def folder(self, death: tuple[int, int]) -> Path:
        return self.scratch / f"{death[0]}-{death[1]}"

    def _folder(self, death: tuple[int, int]) -> Path:
        self.folder(death).mkdir()
        return self.folder(death)

    def _start(self, death: tuple[int, int]) -> list[Any]:
        folder = self._folder(death)
        arguments = (self.model_dir, folder, death, self.asynchronous)
        return start_ranks(self.world_size, folder / "ranks", save_twice, *arguments)


@pytest.mark.parametrize(
    ("world_size", "asynchronous"), [(1, True), (1, False), (2, True)], ids=str
)
def test_a_death_at_any_operation_leaves_a_whole_checkpoint_that_holds_what_was_told(
    llama_dir, tmp_path, world_size, asynchronous
):
    deaths = Deaths(world_size, asynchronous, llama_dir, tmp_path)
    ranks = deaths.whole()
    # Of two ranks, the first one's every second operation: its own are those of one process.
    stride = 1 if world_size == 1 else 2
    chosen = [(0, n) for n in range(1, ranks[0]["operations"] + 1, stride)]
    chosen += [(r, n) for r in range(1, world_size) for n in range(1, ranks[r]["operations"] + 1)]
    assert len(chosen) > 10
    deaths.die(chosen)
    engine, steps = open_engine(llama_dir), []
    for death in chosen:
        folder = deaths.folder(death)
        state = checkpoints_in(folder).load_newest(parts_of(engine))
        assert state is not None
        steps.append(state.step)
        assert (folder / "told-0").read_bytes()[:1] <= bytes([state.step])
        assert_close(parameters_of(engine), ranks[0]["held"][state.step - 1], atol=0.0)
        # A new run goes on over what the death left.
        after = checkpoints_in(folder)
        after.save(parts_of(engine), RunState("run", step=3))
        after.finish()
        assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-00000003"]
    assert set(steps) == {1, 2}


def train_while_writing(topology: Topology, model_dir: Path, folder: Path) -> dict[str, Any]:
    """Steps between the copy and the first byte; then another save, which has to wait."""
    root = folder / "checkpoints"
    engine = open_engine(model_dir, topology=topology)
    checkpoints = checkpoints_in(folder, topology)
    may_write, seen = threading.Event(), {}

    def hold(event: str, path: Path) -> None:
        if path.name.endswith(".distcp"):
            assert may_write.wait(DEADLINE_S)
        if event == "os.mkdir" and may_write.is_set():
            seen.setdefault("before the next", sorted(entry.name for entry in root.iterdir()))

    train_step(engine, topology, 0)
    saved = parameters_of(engine)
    watch(root, hold)
    checkpoints.save(parts_of(engine), RunState("run", step=1))
    for step in (1, 2):
        train_step(engine, topology, step)
    seen["while writing"] = sorted(entry.name for entry in root.iterdir())
    seen["told while writing"] = checkpoints.safe_step
    may_write.set()
    checkpoints.save(parts_of(engine), RunState("run", step=3))
    checkpoints.finish()
    again = open_engine(model_dir, topology=topology)
    assert checkpoints.load_newest(parts_of(again)) == RunState("run", step=3)
    trained = parameters_of(engine)
    return {"saved": saved, "trained": trained, "loaded": parameters_of(again), "seen": seen}


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(
    llama_dir, tmp_path, world_size
):
    ranks = run_ranks(
        world_size, tmp_path / "ranks", train_while_writing, llama_dir, tmp_path / "run"
    )
    seen = ranks[0]["seen"]
    assert seen["while writing"] == [".staging"]
    assert seen["told while writing"] == -1
    assert seen["before the next"] == ["step-00000001"]
    for rank in ranks:
        assert_close(rank["loaded"], rank["trained"], atol=0.0)


def hold_the_copy(topology: Topology, model_dir: Path, folder: Path) -> tuple[Any, Any, Any]:
    engine = open_engine(model_dir, topology=topology)
    checkpoints = checkpoints_in(folder, topology)
    may_write = threading.Event()
    watch(folder, lambda event, path: path.suffix != ".distcp" or may_write.wait(DEADLINE_S))
    held = []
    for step in (1, 2):  # the second copy goes into the memory of the first
        may_write.clear()
        train_step(engine, topology, step)
        held.append(parameters_of(engine))
        checkpoints.save(parts_of(engine), RunState("run", step=step))
        train_step(engine, topology, step + 10)
        may_write.set()
        checkpoints.finish()
        again = open_engine(model_dir, topology=topology)
        checkpoints.load_newest(parts_of(again))
        held.append(parameters_of(again))
    return held


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_holds_what_there_was_when_it_began(llama_dir, tmp_path, world_size):
    for rank in run_ranks(world_size, tmp_path / "ranks", hold_the_copy, llama_dir, tmp_path):
        for saved, loaded in (rank[:2], rank[2:]):
            assert_close(loaded, saved, atol=0.0)


def run_out_of_disk(topology: Topology, model_dir: Path, folder: Path, asynchronous: bool) -> Any:
    """The last rank may write no more than a page, for one checkpoint."""
    engine = open_engine(model_dir, topology=topology)
    checkpoints = checkpoints_in(folder, topology, asynchronous)
    checkpoints.save(parts_of(engine), RunState("run", step=1))
    checkpoints.finish()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    infinite = resource.RLIM_INFINITY
    if topology.rank == topology.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, infinite))
    failed = rf"could not be written: rank {topology.world_size - 1}: OSError: .*File too large"
    with pytest.raises(StateError, match=failed):
        checkpoints.save(parts_of(engine), RunState("run", step=2))
        assert asynchronous
        checkpoints.save(parts_of(engine), RunState("run", step=3))
    resource.setrlimit(resource.RLIMIT_FSIZE, (infinite, infinite))
    left = checkpoints.load_newest(parts_of(engine)), checkpoints.safe_step
    checkpoints.save(parts_of(engine), RunState("run", step=4))
    checkpoints.finish()
    return left, checkpoints.load_newest(parts_of(engine))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_checkpoint_that_cannot_be_written_raises_on_every_rank_and_leaves_the_one_before(
    llama_dir, tmp_path, world_size, asynchronous
):
    arguments = (llama_dir, tmp_path / "run", asynchronous)
    for left, last in run_ranks(world_size, tmp_path / "ranks", run_out_of_disk, *arguments):
        assert left == (RunState("run", step=1), 0)
        assert last == RunState("run", step=4)


def test_files_are_durable_before_a_checkpoint_has_its_name(llama_dir, tmp_path, monkeypatch):
    synced, missing = set(), []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def watched_rename(source: Path, target: Path, **options: Any) -> None:
        if Path(target).name.startswith("step-"):
            parts = [source, *Path(source).rglob("*")]
            missing.extend(part for part in parts if os.stat(part).st_ino not in synced)
            synced.clear()
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(parts_of(open_engine(llama_dir)), RunState("run", step=1))
    checkpoints.finish()
    assert missing == []
    assert os.stat(tmp_path / "checkpoints").st_ino in synced  # the new name is too


@pytest.fixture(scope="module")
def saved(llama_dir, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    engine = open_engine(llama_dir)
    train_step(engine, ALONE, 0)
    engine.save(SaveLoadMeta(str(folder)))
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garble(path: Path) -> None:
    path.write_bytes(b"garbage" + path.read_bytes()[7:])


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("__0_0.distcp", cut, r"__0_0\.distcp has \d+ of \d+ bytes; delete it"),
        ("__0_0.distcp", Path.unlink, r"__0_0\.distcp is missing; delete it"),
        (".metadata", Path.unlink, r"no \.metadata, which is written last; delete it"),
        (".metadata", cut, r"\.metadata cannot be read"),
        (".metadata", garble, r"\.metadata cannot be read"),
    ],
    ids=["cut_off", "missing", "no_metadata", "metadata_cut_off", "metadata_garbled"],
)
def test_a_damaged_checkpoint_is_refused_before_anything_is_loaded(
    llama_dir, saved, tmp_path, file, damage, message
):
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    damage(folder / file)
    engine = open_engine(llama_dir)
    before = parameters_of(engine)
    with pytest.raises(StateError, match=message):
        engine.load(SaveLoadMeta(str(folder)))
    assert_close(parameters_of(engine), before, atol=0.0)


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(llama_dir, saved, tmp_path):
    deeper = open_engine(save_model(tmp_path / "deeper", "llama", num_layers=3))
    with pytest.raises(ConfigError, match=r"it lacks model\.layers\.2\..*; and \d+ more"):
        deeper.load(SaveLoadMeta(str(saved)))
    with pytest.raises(ConfigError, match=r"float32\[61, 32\] there and bfloat16\[61, 32\] here"):
        open_engine(llama_dir, dtype="bfloat16").load(SaveLoadMeta(str(saved)))
    critic = open_engine(llama_dir, head="value")
    with pytest.raises(ConfigError, match=r"it lacks score\.weight; it also holds lm_head\.weight"):
        critic.load(SaveLoadMeta(str(saved)))
    weights = SaveLoadMeta(str(tmp_path / "weights"), with_optim=False)
    open_engine(llama_dir).save(weights)
    with pytest.raises(ConfigError, match="it holds weights without an optimizer"):
        open_engine(llama_dir).load(SaveLoadMeta(weights.path))
