"""From where a server takes weights: what was allowed, and no way around it."""

import os

import pytest

from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from tests.contract.weight_channel_suite import (
    VERSION,
    assert_equal_bits,
    in_folders,
    shapes_of,
    stage,
    weights,
)
from tests.unit.weight_sync.range_server import RangeServer
from weight_sync.receiver import make_receiver
from weight_sync.transports.base import check_allowed
from weight_sync.transports.disk import make_local_publisher

GIVEN = weights(num_big=1)
SHAPES = shapes_of(GIVEN)


@pytest.fixture
def published(tmp_path):
    """The folder of a version, below `tmp_path/weights`."""
    publisher = make_local_publisher(str(tmp_path / "weights"))
    meta = publisher.publish(VERSION, GIVEN.items())
    publisher.close()
    return meta


def config(*allow, peers=True):
    return ReceiverConfig(allow=allow, peers=peers)


@pytest.mark.parametrize(
    ("allowed", "path"),
    [
        ("/runs/weights", "/runs/weights/v00000007"),
        ("/runs/weights/", "/runs/weights/v00000007"),
        ("/runs/weights", "file:///runs/weights/v00000007"),
        ("file:///runs/weights", "/runs/weights/v00000007"),
        ("shm:///dev/shm/run", "shm:///dev/shm/run/v00000007"),
        ("s3://bucket/run", "s3://bucket/run/v00000007"),
        ("http://trainer:8100", "http://trainer:8100/v00000007"),
        ("http://trainer:", "http://trainer:8100/v00000007"),
        ("https://trainer", "https://trainer/v00000007"),
        ("gloo://trainer:", "gloo://trainer:29500/v00000007"),
        ("gloo:", "gloo://trainer:29500/v00000007"),
        ("nccl:", "nccl://trainer:29500/v00000007"),
        ("gloo://[::1]:", "gloo://[::1]:29500/v00000007"),
    ],
)
def test_what_lies_below_is_allowed(allowed, path):
    check_allowed(path, config("/elsewhere", allowed))


@pytest.mark.parametrize(
    ("allowed", "path"),
    [
        ("/runs/weights", "/runs/weights2/v00000007"),
        ("/runs/weights", "/runs/weights/../other/v00000007"),
        ("/runs/weights", "/runs"),
        ("/runs/weights", "/etc"),
        ("/runs/weights", "v00000007"),
        ("/runs/weights", ""),
        ("/runs/weights", "file:///runs/other/v00000007"),
        ("/runs/weights", "s3://runs/weights/v00000007"),
        ("/runs/weights", "http://host/runs/weights/v00000007"),
        ("s3://bucket/run", "s3://bucket/run2/v00000007"),
        ("s3://bucket/run", "s3://bucket/run/../other/v00000007"),
        ("s3://bucket/run", "gs://bucket/run/v00000007"),
        ("s3://bucket/run", "/bucket/run/v00000007"),
        ("http://trainer", "http://trainer.evil/v00000007"),
        ("http://trainer:8100", "http://trainer:81000/v00000007"),
        ("http://trainer:8100", "https://trainer:8100/v00000007"),
        ("http://trainer:8100", "http://trainer:8100/../v00000007"),
        ("http://trainer:", "http://trainer:80@evil/v00000007"),
        ("http://trainer:", "http://trainer:x@evil:80/v00000007"),
        ("gloo:", "nccl://trainer:29500/v00000007"),
        ("gloo://trainer:29500", "gloo://evil:29500/v00000007"),
    ],
)
@pytest.mark.parametrize("peers", [True, False])
def test_what_lies_elsewhere_is_not_allowed(allowed, path, peers):
    with pytest.raises(SyncError, match=r"add it to weights\.allow"):
        check_allowed(path, config(allowed, peers=peers))


@pytest.mark.parametrize(
    ("path", "is_peer"),
    [
        ("http://server:8000/v1/weights/held/7", True),
        ("https://server/v1/weights/held/0", True),
        ("http://server:8000/v1/weights/held/", False),
        ("http://server:8000/v1/weights/held/7/../8", False),
        ("http://server:8000/v1/weights/held/²", False),
        ("http://server:8000/v1/weights/held/x7", False),
        ("http://server:8000/v1/weights", False),
        ("http://server:8000/other?/v1/weights/held/7", False),
        ("http://server:8000/other/v1/weights/held/7", False),
        ("s3://server/v1/weights/held/7", False),
        ("/v1/weights/held/7", False),
    ],
)
def test_peers_are_allowed_where_they_serve_what_they_hold(path, is_peer):
    for peers in (True, False):
        try:
            check_allowed(path, config(peers=peers))
        except SyncError as error:
            assert "weights.allow" in error.message
            assert not (is_peer and peers)
        else:
            assert is_peer and peers


def test_a_peer_brings_a_version_unless_peers_are_off(published, tmp_path):
    with RangeServer(tmp_path / "weights" / "v00000007", "/v1/weights/held/7") as server:
        meta = WeightUpdateMeta(VERSION, server.url, published.digest)
        assert_equal_bits(stage(make_receiver(config()), meta, SHAPES).tensors, GIVEN)
        asked = len(server.requests)
        with pytest.raises(SyncError, match="outside of what this server takes"):
            stage(make_receiver(config(peers=False)), meta, SHAPES)
        assert len(server.requests) == asked


def test_a_fallback_that_is_not_allowed_is_not_asked(published, tmp_path):
    with RangeServer(tmp_path / "weights" / "v00000007", "/v00000007") as server:
        meta = WeightUpdateMeta(VERSION, "/nowhere/v00000007", published.digest, (server.url,))
        with pytest.raises(SyncError, match="outside of what this server takes"):
            stage(make_receiver(config("/nowhere")), meta, SHAPES)
        assert server.requests == []


@pytest.mark.parametrize(
    "path",
    [
        "http://user@{host}/v00000007",
        "http://{host}/%2e%2e/v00000007",
        "http://{host}/v00000007?x=1",
        "http://{host}/v00000007#x",
        "http://{host}/a\\b/v00000007",
        "http://{host}/a b/v00000007",
        "http://{host}/\r\nx:/v00000007",
        "http:{host}/v00000007",
    ],
)
def test_a_url_with_anything_unusual_is_not_asked(tmp_path, path):
    with RangeServer(tmp_path) as server:
        path = path.format(host=f"127.0.0.1:{server.server_address[1]}")
        receiver = make_receiver(config(path.rpartition("/")[0], "http:"))
        with pytest.raises(SyncError, match=r"is no plain URL|outside of what"):
            stage(receiver, WeightUpdateMeta(VERSION, path), {})
        assert server.requests == []


@pytest.mark.parametrize("path", ["nosuch://place/v00000007", "nosuch://place/run/v00000007"])
def test_an_unknown_scheme_is_refused(path):
    with pytest.raises(SyncError, match="cannot be opened"):
        stage(make_receiver(config("nosuch://place")), WeightUpdateMeta(VERSION, path), {})


@in_folders
def test_a_folder_behind_a_link_that_leads_out_is_refused(channel, tmp_path):
    outside = make_local_publisher(str(tmp_path / "outside"))
    meta = outside.publish(VERSION, GIVEN.items())
    outside.close()
    publisher = channel.publisher()
    path = publisher.announce(8).path.replace("v00000008", "v00000007")
    os.symlink(meta.path, channel.folder / "v00000007")
    with pytest.raises(SyncError, match=r"outside of what this server takes|there is no version"):
        stage(channel.receiver(), WeightUpdateMeta(VERSION, path), SHAPES)


def test_a_root_behind_a_link_is_still_the_root(published, tmp_path):
    root, link = tmp_path / "weights", tmp_path / "link"
    link.symlink_to(root)
    for allowed, path in ((link, published.path), (root, str(link / "v00000007"))):
        staged = stage(make_receiver(config(str(allowed))), WeightUpdateMeta(VERSION, path), SHAPES)
        assert staged.version == VERSION
