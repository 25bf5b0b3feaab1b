"""One publisher per place, and what is left when it is killed, or its disk is full."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tests.unit.weight_sync.publish_child as publish_child
from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from tests.contract.weight_channel_suite import (
    VERSION,
    Channel,
    assert_equal_bits,
    in_folders,
    shapes_of,
    stage,
    weights,
)
from weight_sync.transports.base import make_publisher

LONG_RUN = (
    "test_a_file_that_cannot_grow_leaves_no_version[file-url]",
    "test_a_file_that_cannot_grow_leaves_no_version[shared-memory]",
    "test_a_file_that_cannot_grow_leaves_no_version[http]",
)
GIVEN = weights(num_big=1)
SHAPES = shapes_of(GIVEN)


def start_child(channel: Channel, mode: str, version: int = 2) -> subprocess.Popen[str]:
    section = channel.config(shard_bytes=1 << 20).model_dump_json()
    return subprocess.Popen(
        [sys.executable, publish_child.__file__, section, str(version), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def versions(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))


@in_folders
def test_a_place_has_one_publisher_at_a_time(channel):
    first = channel.publisher()
    with pytest.raises(SyncError, match=r"has a publisher already \(process \d+"):
        channel.publisher()
    first.publish(VERSION, GIVEN.items())
    channel.close_publishers()
    assert channel.publisher().latest() == VERSION


@in_folders
def test_a_publisher_in_another_process_is_named_until_it_is_killed(channel):
    with start_child(channel, "whole") as child:
        path, digest = json.loads(child.stdout.readline())
        with pytest.raises(SyncError, match=rf"has a publisher already \(process {child.pid} on"):
            channel.publisher()
        wanted = {f"w{i}": torch.full((publish_child.SIZE,), float(i)) for i in range(4)}
        meta = WeightUpdateMeta(2, path, digest)
        assert_equal_bits(stage(channel.receiver(), meta, shapes_of(wanted)).tensors, wanted)
        child.send_signal(signal.SIGKILL)
        child.wait()
    publisher = channel.publisher()
    assert publisher.latest() == 2
    with pytest.raises(SyncError, match="take a newer number"):
        publisher.announce(2)


@in_folders
def test_a_publisher_killed_midway_leaves_no_version(channel):
    channel.publisher().publish(1, GIVEN.items())
    channel.close_publishers()
    with start_child(channel, "stopped") as child:
        assert child.stdout.readline() == "midway\n"
        child.send_signal(signal.SIGKILL)
    assert versions(channel.folder) == ["v00000001", "v00000002"]
    publisher = channel.publisher()
    assert versions(channel.folder) == ["v00000001"]
    assert publisher.latest() == 1
    meta = publisher.publish(2, GIVEN.items())
    assert_equal_bits(stage(channel.receiver(), meta, SHAPES).tensors, GIVEN)
    again = WeightUpdateMeta(1, meta.path.replace("v00000002", "v00000001"))
    assert_equal_bits(stage(channel.receiver(), again, SHAPES).tensors, GIVEN)


@in_folders
def test_a_file_that_cannot_grow_leaves_no_version(channel):
    channel.publisher().publish(1, GIVEN.items())
    channel.close_publishers()
    with start_child(channel, "limited") as child:
        answer = child.stdout.read()
    assert child.returncode == 0
    assert answer.startswith("refused: cannot publish version 2 at ")
    assert versions(channel.folder) == ["v00000001"]
    assert channel.publisher().latest() == 1


@in_folders
def test_a_root_that_went_away_is_a_sync_error(channel):
    publisher = channel.publisher()
    channel.folder.rename(channel.folder.with_name("moved"))
    with pytest.raises(SyncError, match="cannot publish version 1"):
        publisher.publish(1, GIVEN.items())
    channel.folder.with_name("moved").rename(channel.folder)
    publisher.publish(1, GIVEN.items())


@in_folders
def test_strangers_in_the_place_are_left_alone(channel):
    publisher = channel.publisher()
    meta = publisher.publish(VERSION, GIVEN.items())
    for name in ("v9", "v00000010.bak", "latest"):
        (channel.folder / name).mkdir()
    channel.close_publishers()
    publisher = channel.restarted(meta)
    assert publisher.latest() == VERSION
    assert versions(channel.folder) == sorted(["latest", "v00000007", "v00000010.bak", "v9"])


@pytest.fixture
def small(channel, tmp_path) -> Iterator[Path]:
    """8 MiB of tmpfs."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets nobody mount a tmpfs")
    yield folder
    channel.close_publishers()
    subprocess.run(["umount", "-l", str(folder)], check=True)


@in_folders
def test_a_full_disk_leaves_no_version_and_room_for_the_next(channel, small):
    root = small / "weights"
    prefix = "file://" if channel.kind.name == "file-url" else ""
    config = channel.config(root=f"{prefix}{root}", shard_bytes=1 << 20)
    publisher = make_publisher(config)
    try:
        publisher.publish(1, weights(num_big=2).items())
        with pytest.raises(SyncError, match="cannot publish version 2"):
            publisher.publish(2, weights(num_big=12).items())
        assert versions(root) == ["v00000001"]
        given = {f"w{i}": torch.rand((1 << 18) - 1000) for i in range(4)}  # of another size
        meta = publisher.publish(2, given.items())
        staged = stage(channel.receiver(allow=(config.origin,)), meta, shapes_of(given))
        assert_equal_bits(staged.tensors, given)
        del staged
    finally:
        publisher.close()
