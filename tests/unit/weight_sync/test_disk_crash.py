import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headway.contracts.errors import SyncError
from weight_sync.transports.disk import STAGING_PREFIX, DiskPublisher, list_versions

CHILD = Path(__file__).parent / "publish_child.py"


def start_child(root: Path, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CHILD), str(root), mode], stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def first(make_publisher, weights):
    """Version 1 is out."""
    return make_publisher().publish(1, weights.items())


def test_a_publisher_killed_midway_leaves_no_version(first, root, make_publisher, reader, shapes):
    with start_child(root, "stopped") as child:
        assert child.stdout.readline() == "midway\n"
        child.send_signal(signal.SIGKILL)
    assert list(root.glob(f"{STAGING_PREFIX}*"))
    assert list_versions(root) == [1]
    assert reader.stage(first, shapes).version == 1
    publisher = make_publisher()
    assert [entry.name for entry in root.iterdir()] == ["v00000001"]
    assert publisher.publish(2, {"w": torch.ones(1)}.items()) == publisher.locate(2)
    assert list_versions(root) == [1, 2]


def test_a_file_that_cannot_grow_leaves_no_version(first, root, reader, shapes):
    with start_child(root, "limited") as child:
        answer = child.stdout.read()
    assert child.returncode == 0
    assert answer.startswith("refused: cannot publish version 2 below")
    assert [entry.name for entry in root.iterdir()] == ["v00000001"]
    assert reader.stage(first, shapes).version == 1


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets nobody mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_leaves_no_version_and_room_for_the_next(small_disk):
    publisher = DiskPublisher(str(small_disk), keep=3, shard_bytes=1)
    publisher.publish(1, {"w": torch.ones(1000)}.items())
    too_large = {f"w{index}": torch.ones(1 << 16) for index in range(8)}
    with pytest.raises(SyncError, match="cannot publish version 2"):
        publisher.publish(2, too_large.items())
    assert [entry.name for entry in small_disk.iterdir()] == ["v00000001"]
    publisher.publish(2, {"w": torch.ones(1000)}.items())
    assert list_versions(small_disk) == [1, 2]
