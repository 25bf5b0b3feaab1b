"""Memory that trainer and servers share: written again when nobody reads it, and never before."""

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.contracts.config.weight_sync import ReceiverConfig, SharedMemorySync
from headway.contracts.types import WeightUpdateMeta
from tests.processes import FORKS
from weight_sync.channel import StagedWeights
from weight_sync.deadline import Deadline
from weight_sync.publisher import StoredPublisher
from weight_sync.receiver import make_receiver
from weight_sync.transports.base import make_publisher

LIMIT_S = 60.0
SIZE = 1 << 18
SHAPES = {"a": torch.Size([SIZE]), "b": torch.Size([SIZE])}


def weights(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((SIZE,), float(version)) for name in SHAPES}


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="headway-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def publisher(root: Path) -> Iterator[StoredPublisher]:
    config = SharedMemorySync(root=str(root), keep=1, shard_bytes=1 << 20)
    made = make_publisher(config)
    yield made
    made.close()


def stage(root: Path, meta: WeightUpdateMeta) -> StagedWeights:
    receiver = make_receiver(ReceiverConfig(allow=(f"shm://{root}",)))
    return receiver.within(Deadline(LIMIT_S)).stage(meta, SHAPES)


def blobs(root: Path) -> set[int]:
    """Inodes of what is published."""
    return {file.stat().st_ino for file in root.glob("v*/*.safetensors")}


def publish(publisher: StoredPublisher, version: int) -> WeightUpdateMeta:
    meta = publisher.publish(version, weights(version).items())
    publisher.collect(version)
    return meta


def assert_version(staged: StagedWeights, version: int) -> None:
    assert all(tensor.eq(version).all() for tensor in staged.tensors.values())


def test_blobs_that_nobody_reads_are_written_again(publisher, root):
    publish(publisher, 1)
    first = blobs(root)
    publish(publisher, 2)
    meta = publish(publisher, 3)
    assert blobs(root) == first
    assert_version(stage(root, meta), 3)


def test_a_publisher_that_comes_back_writes_old_blobs_again(root):
    config = SharedMemorySync(root=str(root), keep=1, shard_bytes=1 << 20)
    first = make_publisher(config)
    publish(first, 1)
    publish(first, 2)  # version 1 is retired
    retired = {file.stat().st_ino for file in (root / ".free").iterdir()}
    first.close()
    second = make_publisher(config)
    meta = publish(second, 3)
    second.close()
    assert retired
    assert blobs(root) == retired
    assert_version(stage(root, meta), 3)


def test_retired_blobs_may_be_deleted_by_anybody(publisher, root):
    publish(publisher, 1)
    publish(publisher, 2)
    for file in (root / ".free").iterdir():
        file.unlink()
    assert_version(stage(root, publish(publisher, 3)), 3)
    assert_version(stage(root, publish(publisher, 4)), 4)


def test_blobs_that_serve_are_not_written_again(publisher, root):
    serving = stage(root, publish(publisher, 1))
    first = blobs(root)
    for version in (2, 3, 4):
        publish(publisher, version)
        assert not blobs(root) & first
        assert_version(serving, 1)
    del serving
    publish(publisher, 5)
    publish(publisher, 6)
    assert len(list((root / ".free").iterdir())) == len(first)


def test_one_tensor_of_a_blob_keeps_it(publisher, root):
    row = stage(root, publish(publisher, 1)).tensors["a"][5:7]
    for version in (2, 3, 4):
        publish(publisher, version)
    assert row.tolist() == [1.0, 1.0]


def test_two_servers_keep_a_blob_until_both_let_go(publisher, root):
    meta = publish(publisher, 1)
    first, second = stage(root, meta), stage(root, meta)
    del first
    for version in (2, 3):
        publish(publisher, version)
    assert_version(second, 1)


def test_what_a_server_writes_stays_its_own(publisher, root):
    meta = publish(publisher, 1)
    mine, other = stage(root, meta), stage(root, meta)
    mine.tensors["a"].fill_(9.0)
    assert_version(stage(root, meta), 1)
    assert other.version == 1


def serve(root: str, path: str, pipe) -> None:
    staged = stage(Path(root), WeightUpdateMeta(1, path))
    pipe.send(float(staged.tensors["a"][0]))
    threading.Event().wait()


def test_a_server_that_is_killed_lets_go_of_its_blobs(publisher, root):
    meta = publish(publisher, 1)
    first = blobs(root)
    pipe, theirs = FORKS.Pipe()
    child = FORKS.Process(target=serve, args=(str(root), meta.path, theirs), daemon=True)
    child.start()
    assert pipe.poll(LIMIT_S)
    assert pipe.recv() == 1.0
    publish(publisher, 2)
    assert not blobs(root) & first
    publisher.publish(3, weights(3).items())
    assert not blobs(root) & first  # retired, and still in use
    child.kill()
    child.join(LIMIT_S)
    meta = publisher.publish(4, weights(4).items())
    assert first <= blobs(root)
    assert_version(stage(root, meta), 4)


def test_memory_of_another_size_is_not_kept(publisher, root):
    publish(publisher, 1)
    for version, size in ((2, SIZE + 1), (3, SIZE + 2), (4, SIZE + 3)):
        tensors = {name: torch.full((size,), float(version)) for name in SHAPES}
        publisher.publish(version, tensors.items())
        publisher.collect(version)
    files = [file for file in root.rglob("*") if file.is_file() and file.stat().st_size > SIZE]
    assert len(files) == 2 * len(SHAPES)  # one version, and the one before for the next
