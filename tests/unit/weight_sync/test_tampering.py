"""Whatever was changed after publication, a server refuses the version and keeps its own."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from weight_sync.manifest import MANIFEST_NAME, TensorEntry, make_manifest, parse_manifest
from weight_sync.transports.disk import DiskReader


def shard_of(published, index: int = 0) -> Path:
    return Path(published.path) / f"shard-{index:05d}.safetensors"


def edit_manifest(published, edit, is_resealed: bool = False) -> None:
    """Change the manifest's fields; resealed = with a digest that fits again."""
    file = Path(published.path) / MANIFEST_NAME
    tree = json.loads(file.read_text())
    edit(tree)
    if is_resealed:
        entries = [TensorEntry.model_validate(entry) for entry in tree["tensors"]]
        tree["digest"] = make_manifest(tree["version"], entries).digest
    file.write_text(json.dumps(tree))


def test_a_flipped_bit_in_any_weight_is_refused(published, reader, shapes):
    file = shard_of(published)
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for position in range(start, len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(SyncError, match=r"embed\.weight .* has a wrong checksum"):
            reader.stage(published, shapes)
    file.write_bytes(content)
    assert reader.stage(published, shapes).version == 7


def test_no_change_to_a_shard_passes_or_raises_anything_else(published, reader, shapes, weights):
    file = shard_of(published)
    content = file.read_bytes()

    @given(st.integers(0, len(content) - 1), st.integers(1, 255))
    def check(position, mask):
        damaged = bytearray(content)
        damaged[position] ^= mask
        file.write_bytes(damaged)
        try:
            staged = reader.stage(published, shapes)
        except SyncError:
            return
        assert staged.tensors["embed.weight"].equal(weights["embed.weight"])

    check()


def test_a_truncated_shard_is_refused(published, reader, shapes):
    file = shard_of(published)
    content = file.read_bytes()
    for length in (0, 4, 8, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(SyncError, match="is torn"):
            reader.stage(published, shapes)


def test_a_missing_or_exchanged_shard_is_refused(published, reader, shapes):
    shard_of(published, 1).write_bytes(shard_of(published, 0).read_bytes())
    with pytest.raises(SyncError, match="is torn"):
        reader.stage(published, shapes)
    shard_of(published, 1).unlink()
    with pytest.raises(SyncError, match="is torn"):
        reader.stage(published, shapes)


@pytest.mark.parametrize(
    "edit",
    [
        lambda tree: tree.update(version=8),
        lambda tree: tree.update(digest="0" * 64),
        lambda tree: tree["tensors"].pop(),
        lambda tree: tree["tensors"][0].update(sha256="0" * 64),
        lambda tree: tree["tensors"][0].update(shard="shard-00001.safetensors"),
        lambda tree: tree["tensors"][0].update(shape=[3, 4]),
    ],
    ids=["version", "digest", "a tensor less", "checksum", "shard", "shape"],
)
def test_an_edited_manifest_is_refused(published, reader, shapes, edit):
    edit_manifest(published, edit)
    with pytest.raises(SyncError, match="was changed after it was written"):
        reader.stage(published, shapes)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tree: tree.update(version=8), "holds version 8, not 7"),
        (lambda tree: tree["tensors"][0].update(sha256="0" * 64), "has a wrong checksum"),
        (lambda tree: tree["tensors"][0].update(shape=[12]), "shapes"),
        (lambda tree: tree["tensors"][0].update(dtype="float16"), "not what the manifest says"),
        (lambda tree: tree["tensors"][0].update(shard="shard-00001.safetensors"), "is torn"),
        (lambda tree: tree["tensors"].pop(), "missing"),
    ],
    ids=["version", "checksum", "shape", "dtype", "shard", "a tensor less"],
)
def test_a_resealed_manifest_still_has_to_fit(published, reader, shapes, edit, message):
    edit_manifest(published, edit, is_resealed=True)
    with pytest.raises(SyncError, match=message):
        reader.stage(published, shapes)


@pytest.mark.parametrize(
    "edit",
    [
        lambda tree: tree.update(format=2),
        lambda tree: tree.update(format=0),
        lambda tree: tree.update(version=-1),
        lambda tree: tree.update(tensors=[]),
        lambda tree: tree.update(extra=1),
        lambda tree: tree.pop("digest"),
        lambda tree: tree["tensors"][0].update(shard="../../secret.safetensors"),
        lambda tree: tree["tensors"][0].update(shard="/etc/secret.safetensors"),
        lambda tree: tree["tensors"][0].update(shard="passwd"),
        lambda tree: tree["tensors"][0].update(name=""),
    ],
)
def test_what_is_no_manifest_is_refused(published, reader, shapes, edit):
    edit_manifest(published, edit)
    with pytest.raises(SyncError, match="is not a weight manifest"):
        reader.stage(published, shapes)


@given(st.one_of(st.text(max_size=80), st.just("[" * 50_000), st.just('{"format":1}')))
def test_no_text_raises_anything_but_a_sync_error(text):
    with pytest.raises(SyncError, match="origin"):
        parse_manifest(text, "origin")


def test_a_manifest_that_is_no_text_is_refused(published, reader, shapes):
    (Path(published.path) / MANIFEST_NAME).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SyncError, match="no readable manifest"):
        reader.stage(published, shapes)


def test_weights_of_another_model_are_refused(published, reader, shapes):
    more = shapes | {"head.weight": torch.Size([2])}
    with pytest.raises(SyncError, match=r"missing \['head\.weight'\], extra \[\]"):
        reader.stage(published, more)
    fewer = {name: shape for name, shape in shapes.items() if name != "scale"}
    with pytest.raises(SyncError, match=r"missing \[\], extra \['scale'\]"):
        reader.stage(published, fewer)
    other = shapes | {"embed.weight": torch.Size([3, 4])}
    with pytest.raises(
        SyncError, match=r"embed\.weight: \(4, 3\) published, \(3, 4\) in the model"
    ):
        reader.stage(published, other)


def test_another_version_than_announced_is_refused(published, reader, shapes):
    with pytest.raises(SyncError, match="holds version 7, not 8"):
        reader.stage(WeightUpdateMeta(8, published.path), shapes)


def test_a_path_outside_of_the_root_is_refused(published, tmp_path, root, shapes):
    other = tmp_path / "other"
    other.mkdir()
    reader = DiskReader(str(other))
    os.symlink(published.path, other / "v00000007")
    (other / "sub").mkdir()
    for path in (
        published.path,
        str(other / ".." / "weights" / "v00000007"),
        str(other / "sub" / ".." / ".." / "weights" / "v00000007"),
        str(other / "v00000007"),
        "/etc",
        "",
        "v00000007",
    ):
        with pytest.raises(SyncError, match="outside of the allowed weights directory"):
            reader.stage(WeightUpdateMeta(7, path), shapes)


def test_a_shard_that_leads_outside_of_the_root_is_refused(published, reader, shapes, tmp_path):
    file = shard_of(published)
    outside = tmp_path / "outside.safetensors"
    file.rename(outside)
    file.symlink_to(outside)
    with pytest.raises(SyncError, match="outside of the allowed weights directory"):
        reader.stage(published, shapes)


def test_a_root_behind_a_link_is_still_the_root(published, root, tmp_path, shapes):
    (tmp_path / "link").symlink_to(root)
    for reader_root, path in (
        (tmp_path / "link", published.path),
        (root, str(tmp_path / "link" / "v00000007")),
    ):
        assert DiskReader(str(reader_root)).stage(WeightUpdateMeta(7, path), shapes).version == 7
