"""Whatever was changed after publication: refused, or mended with the bytes of who holds the version."""

import json
import os
import threading

import pytest
import torch
from hypothesis import given as any_of
from hypothesis import strategies as st

from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from tests.contract.weight_channel_suite import (
    LIMIT_S,
    VERSION,
    assert_equal_bits,
    kept,
    on,
    shapes_of,
    stage,
    weights,
)
from tests.unit.weight_sync.range_server import RangeServer
from weight_sync.deadline import Deadline
from weight_sync.manifest import MANIFEST_NAME, parse_manifest
from weight_sync.transports.disk import make_local_publisher

GIVEN = weights(num_big=2)
SHAPES = shapes_of(GIVEN)
HELD = "/v1/weights/held/7"


@pytest.fixture
def meta(channel):
    return channel.publisher().publish(VERSION, GIVEN.items())


@pytest.fixture
def peer(tmp_path):
    """A server that holds the version, and counts."""
    publisher = make_local_publisher(str(tmp_path / "peer"))
    publisher.publish(VERSION, GIVEN.items())
    publisher.close()
    with RangeServer(tmp_path / "peer" / "v00000007", HELD) as server:
        yield server


@kept
def test_a_flipped_bit_in_any_tensor_is_refused_by_its_name(channel, meta):
    receiver = channel.receiver()
    for name, tensor in GIVEN.items():
        for position in {0, tensor.nbytes - 1} if tensor.nbytes else ():
            channel.files().flip(name, position)
            with pytest.raises(SyncError, match=f"{name} in .* has a wrong checksum"):
                stage(receiver, meta, SHAPES)
            channel.files().flip(name, position)
    assert_equal_bits(stage(receiver, meta, SHAPES).tensors, GIVEN)


@kept
def test_one_damaged_tensor_is_fetched_alone_from_whoever_holds_it(channel, meta, peer):
    channel.files().flip("big.1", 12345)
    told = WeightUpdateMeta(VERSION, meta.path, meta.digest, (peer.url,))
    staged = stage(channel.receiver(), told, SHAPES)
    assert_equal_bits(staged.tensors, GIVEN)
    fetched = [path for path, wanted, _ in peer.requests if wanted is not None]
    texts = [path for path, wanted, _ in peer.requests if wanted is None]
    assert len(fetched) == 1
    assert texts == [f"{HELD}/{MANIFEST_NAME}"]
    manifest = (peer.root / MANIFEST_NAME).stat().st_size
    assert peer.num_bytes == manifest + GIVEN["big.1"].nbytes


@kept
def test_a_holder_that_is_damaged_too_is_no_help(channel, meta, peer):
    channel.files().flip("big.1", 12345)
    for blob in peer.root.glob("*.safetensors"):
        content = blob.read_bytes()
        blob.write_bytes(content[:-4096] + bytes(4096))
    told = WeightUpdateMeta(VERSION, meta.path, meta.digest, (peer.url,))
    with pytest.raises(SyncError, match=r"big\.1 in .* has a wrong checksum"):
        stage(channel.receiver(), told, SHAPES)


@kept
def test_a_version_that_is_gone_comes_from_whoever_holds_it(channel, meta, peer):
    for name in channel.files().names():
        channel.files().delete(name)
    told = WeightUpdateMeta(VERSION, meta.path, meta.digest, ("/nowhere/v00000007", peer.url))
    assert_equal_bits(stage(channel.receiver(), told, SHAPES).tensors, GIVEN)


@kept
def test_a_holder_of_other_weights_is_refused(channel, meta, peer, tmp_path):
    channel.files().delete(MANIFEST_NAME)
    publisher = make_local_publisher(str(tmp_path / "other"))
    publisher.publish(VERSION, weights(seed=9, num_big=2).items())
    publisher.close()
    peer.root = tmp_path / "other" / "v00000007"
    told = WeightUpdateMeta(VERSION, peer.url, meta.digest)
    with pytest.raises(SyncError, match="announced was"):
        stage(channel.receiver(), told, SHAPES)


@kept
def test_no_change_to_a_blob_passes_or_raises_anything_else(channel, meta):
    files, receiver = channel.files(), channel.receiver()
    blob = files.entry("odd.bf16").blob
    content = files.read(blob)

    @any_of(st.integers(0, len(content) - 1), st.integers(1, 255))
    def check(position, mask):
        damaged = bytearray(content)
        damaged[position] ^= mask
        files.write(blob, bytes(damaged))
        try:
            staged = stage(receiver, meta, SHAPES)
        except SyncError:
            return
        assert_equal_bits(staged.tensors, GIVEN)

    check()


@kept
def test_a_truncated_or_empty_blob_is_torn(channel, meta):
    files, receiver = channel.files(), channel.receiver()
    blob = files.entry("big.1").blob
    content = files.read(blob)
    for length in (0, 8, len(content) // 2, len(content) - 1):
        files.write(blob, content[:length])
        with pytest.raises(SyncError, match="torn"):
            stage(receiver, meta, SHAPES)
    files.write(blob, content)
    assert_equal_bits(stage(receiver, meta, SHAPES).tensors, GIVEN)


@kept
def test_a_missing_or_exchanged_blob_is_refused(channel, meta):
    files, receiver = channel.files(), channel.receiver()
    first, second = files.entry("big.0").blob, files.entry("big.1").blob
    assert first != second
    files.write(second, files.read(first))
    with pytest.raises(SyncError, match=r"torn|wrong checksum"):
        stage(receiver, meta, SHAPES)
    files.delete(second)
    with pytest.raises(SyncError, match="torn"):
        stage(receiver, meta, SHAPES)


@kept
def test_a_part_that_is_missing_is_waited_for(channel, meta):
    files = channel.files()
    files.delete(MANIFEST_NAME)
    files.delete("part-00001.json")
    with pytest.raises(SyncError, match=r"no progress for 0\.3 s"):
        stage(channel.receiver(), meta, SHAPES, Deadline(0.3))


@kept
def test_a_tensor_that_no_part_names_comes_from_the_manifest(channel, meta):
    files = channel.files()
    part = json.loads(files.read("part-00000.json"))
    staged = stage_while_written(channel, meta, part[1:])
    assert_equal_bits(staged.tensors, GIVEN)


@kept
def test_a_part_that_lies_is_noticed_at_the_end(channel, meta):
    part = json.loads(channel.files().read("part-00000.json"))
    stranger = {**part[0], "name": "stranger"}
    with pytest.raises(SyncError, match="was changed while it was read"):
        stage_while_written(channel, meta, [stranger, *part[1:]])


def stage_while_written(channel, meta, part):
    """Stage a version whose manifest comes after another first part was read."""
    files, asked = channel.files(), threading.Event()
    manifest = files.read(MANIFEST_NAME)
    files.delete(MANIFEST_NAME)
    files.write("part-00000.json", json.dumps(part).encode())
    staging = channel.start(stage, channel.receiver(), meta, Asked(SHAPES, part[-1]["name"], asked))
    assert asked.wait(LIMIT_S)
    files.write(MANIFEST_NAME, manifest)
    return staging.result(LIMIT_S)


class Asked(dict):
    """Tells when it is asked for a key."""

    def __init__(self, content, key, asked):
        super().__init__(content)
        self._key = key
        self._asked = asked

    def get(self, key, default=None):
        if key == self._key:
            self._asked.set()
        return super().get(key, default)


@kept
@pytest.mark.parametrize("text", [b"", b"[]x", b"\xff\xfe\x00", b'[{"name":"a"}]', b"{}"])
def test_what_is_no_part_is_refused(channel, meta, text):
    files = channel.files()
    files.delete(MANIFEST_NAME)
    files.write("part-00000.json", text)
    with pytest.raises(SyncError, match=r"part-00000\.json is not a part of a version"):
        stage(channel.receiver(), meta, SHAPES)


@kept
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"{}",
        b'{"version":7,"kind":"delta","base":{"version":7,"digest":"' + b"0" * 64 + b'"}}',
    ],
    ids=["empty", "no text", "no fields", "its own base"],
)
def test_what_is_no_announcement_is_refused(channel, meta, text):
    files = channel.files()
    files.delete(MANIFEST_NAME)
    files.write("announcement.json", text)
    with pytest.raises(SyncError, match=r"is damaged|which is not older"):
        stage(channel.receiver(), meta, SHAPES)


EDITS = {
    "version": lambda tree: tree.update(version=8),
    "digest": lambda tree: tree.update(digest="0" * 64),
    "a tensor less": lambda tree: tree["tensors"].pop(),
    "checksum": lambda tree: tree["tensors"][0].update(checksum="0" * 32),
    "shape": lambda tree: tree["tensors"][0].update(shape=[15, 7]),
    "dtype": lambda tree: tree["tensors"][0].update(dtype="float16"),
    "name": lambda tree: tree["tensors"][0].update(name="other"),
}


@kept
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_manifest_is_refused(channel, meta, edit):
    channel.files().edit_manifest(edit)
    with pytest.raises(SyncError, match="was changed after it was written"):
        stage(channel.receiver(), meta, SHAPES)


@kept
@pytest.mark.parametrize("name", [name for name in EDITS if name != "digest"])
def test_a_resealed_manifest_has_not_the_digest_that_was_announced(channel, meta, name):
    channel.files().edit_manifest(EDITS[name], is_resealed=True)
    with pytest.raises(
        SyncError, match=r"announced was|holds version 8|of another model|checksum|takes"
    ):
        stage(channel.receiver(), meta, SHAPES)


@kept
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (EDITS["version"], "holds version 8, not 7"),
        (EDITS["checksum"], "has a wrong checksum"),
        (EDITS["shape"], "of another model"),
        (EDITS["name"], "of another model: missing"),
        (EDITS["a tensor less"], "of another model: missing"),
        (lambda tree: tree["tensors"][0].update(dtype="bfloat16"), "takes .* bytes, not"),
        (lambda tree: tree["tensors"][0].update(dtype="float64"), "type 'float64' is unknown"),
        (lambda tree: tree["tensors"][0].update(blob="shard-00009.safetensors"), "torn"),
        (lambda tree: tree["tensors"][0].update(offset=1 << 40), "torn"),
        (lambda tree: tree["tensors"][0].update(size=1 << 50), "takes at most .* bytes, not"),
        (lambda tree: tree["tensors"][0].update(offset=0), "has a wrong checksum"),
        (lambda tree: tree["tensors"][0].update(codec="same"), "is a difference without a base"),
        (lambda tree: tree["tensors"][0].update(codec="int8"), "takes .* bytes, not"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_resealed_manifest_still_has_to_fit(channel, meta, edit, message):
    channel.files().edit_manifest(edit, is_resealed=True)
    with pytest.raises(SyncError, match=message):
        stage(channel.receiver(), WeightUpdateMeta(VERSION, meta.path), SHAPES)


@kept
@pytest.mark.parametrize(
    "edit",
    [
        lambda tree: tree.update(format=1),
        lambda tree: tree.update(format=3),
        lambda tree: tree.update(version=-1),
        lambda tree: tree.update(tensors=[]),
        lambda tree: tree.update(extra=1),
        lambda tree: tree.pop("digest"),
        lambda tree: tree["tensors"][0].update(blob="../../secret.safetensors"),
        lambda tree: tree["tensors"][0].update(blob="/etc/secret.safetensors"),
        lambda tree: tree["tensors"][0].update(blob=".hidden"),
        lambda tree: tree["tensors"][0].update(name=""),
        lambda tree: tree["tensors"][0].update(offset=-1),
        lambda tree: tree["tensors"][0].update(codec="pickle"),
        lambda tree: tree["tensors"][0].update(shape=[-1]),
    ],
)
def test_what_is_no_manifest_is_refused(channel, meta, edit):
    channel.files().edit_manifest(edit)
    with pytest.raises(SyncError, match="is not a weight manifest"):
        stage(channel.receiver(), meta, SHAPES)


@any_of(st.one_of(st.text(max_size=80), st.just("[" * 50_000), st.just('{"format":2}')))
def test_no_text_raises_anything_but_a_sync_error(text):
    with pytest.raises(SyncError, match="origin"):
        parse_manifest(text, "origin")


@kept
def test_a_manifest_that_is_no_text_is_refused(channel, meta):
    channel.files().write(MANIFEST_NAME, b"\xff\xfe\x00")
    with pytest.raises(SyncError, match="is not a weight manifest"):
        stage(channel.receiver(), meta, SHAPES)


@on("is_folder")
def test_file_times_change_nothing(channel, meta):
    publisher = channel.restarted(meta)
    publisher.publish(VERSION + 1, GIVEN.items())
    for version, time_s in ((VERSION, 4e9), (VERSION + 1, 1.0)):
        folder = channel.folder / f"v{version:08d}"
        for file in (*folder.iterdir(), folder):
            os.utime(file, (time_s, time_s))
    assert publisher.latest() == VERSION + 1
    assert_equal_bits(stage(channel.receiver(), meta, SHAPES).tensors, GIVEN)
    publisher.publish(VERSION + 2, GIVEN.items())
    assert publisher.collect(VERSION + 2) == []
    publisher.publish(VERSION + 3, GIVEN.items())
    assert publisher.collect(VERSION + 3) == [VERSION]


@on("is_folder")
def test_a_link_instead_of_a_file_is_not_followed(channel, meta, tmp_path):
    files, receiver = channel.files(), channel.receiver()
    folder = channel.folder / "v00000007"
    for name in (files.entry("matrix").blob, MANIFEST_NAME):
        outside = tmp_path / f"outside-{name}"
        outside.write_bytes((folder / name).read_bytes())
        (folder / name).unlink()
        (folder / name).symlink_to(outside)
        with pytest.raises(SyncError):
            stage(receiver, meta, SHAPES, Deadline(0.5))
        (folder / name).unlink()
        (folder / name).write_bytes(outside.read_bytes())
    assert torch.equal(stage(receiver, meta, SHAPES).tensors["matrix"], GIVEN["matrix"])
