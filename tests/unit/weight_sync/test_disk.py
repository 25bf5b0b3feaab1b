import json
import shutil
from pathlib import Path

import pytest
import torch

from headway.contracts.errors import SyncError
from weight_sync.manifest import MANIFEST_NAME
from weight_sync.transports.disk import STAGING_PREFIX, list_versions, read_manifest


def assert_equal_bits(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert tensor.shape == right[name].shape
        assert tensor.reshape(-1).view(torch.uint8).equal(right[name].reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_survive_bit_for_bit(make_publisher, reader, weights, shapes, dtype):
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    meta = make_publisher().publish(3, weights.items())
    staged = reader.stage(meta, shapes)
    assert staged.version == meta.version == 3
    assert_equal_bits(dict(staged.tensors), weights)


def test_publication_casts(make_publisher, reader, weights, shapes):
    meta = make_publisher(dtype="bfloat16").publish(1, weights.items())
    staged = reader.stage(meta, shapes)
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    assert_equal_bits(dict(staged.tensors), wanted)


def test_parameters_that_require_grad_or_are_transposed_are_published(make_publisher, reader):
    weights = {
        "grad": torch.nn.Parameter(torch.ones(2)),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }
    meta = make_publisher().publish(1, weights.items())
    staged = reader.stage(meta, {name: tensor.shape for name, tensor in weights.items()})
    assert staged.tensors["transposed"].equal(weights["transposed"])


def test_tensors_that_share_memory_are_published_each(make_publisher, reader):
    stacked = torch.arange(6.0).reshape(2, 3)
    weights = {"embed": stacked, "head": stacked, "row": stacked[1]}
    meta = make_publisher().publish(1, weights.items())
    staged = reader.stage(meta, {name: tensor.shape for name, tensor in weights.items()})
    assert staged.tensors["head"].equal(stacked)
    assert staged.tensors["row"].equal(stacked[1])


@pytest.mark.parametrize(
    ("shard_bytes", "num_shards"), [(1, 4), (50, 2), (60, 2), (64, 1), (1 << 20, 1)]
)
def test_shards_are_filled_up_to_their_size(make_publisher, reader, shard_bytes, num_shards):
    sizes = {"a": 12, "b": 1, "c": 2, "d": 1}  # float32: 48, 4, 8, 4 bytes
    weights = {name: torch.rand(size) for name, size in sizes.items()}
    meta = make_publisher(shard_bytes=shard_bytes).publish(1, weights.items())
    assert len(list(Path(meta.path).glob("shard-*.safetensors"))) == num_shards
    staged = reader.stage(meta, {name: tensor.shape for name, tensor in weights.items()})
    assert_equal_bits(dict(staged.tensors), weights)


def test_staged_weights_outlive_their_files(published, reader, shapes, weights):
    staged = reader.stage(published, shapes)
    shutil.rmtree(published.path)
    assert_equal_bits(dict(staged.tensors), weights)


def test_equal_digests_mean_equal_weights(make_publisher, weights, reader, shapes):
    publisher = make_publisher()
    digest = reader.stage(publisher.publish(1, weights.items()), shapes).digest
    shutil.rmtree(publisher.locate(1).path)
    assert reader.stage(publisher.publish(1, weights.items()), shapes).digest == digest
    shutil.rmtree(publisher.locate(1).path)
    weights["scale"] += 1e-6
    assert reader.stage(publisher.publish(1, weights.items()), shapes).digest != digest


def test_a_version_is_published_once(make_publisher, weights, published, reader, shapes):
    before = read_manifest(Path(published.path))
    with pytest.raises(SyncError, match="a version is published once"):
        make_publisher().publish(7, {"other": torch.ones(1)}.items())
    assert read_manifest(Path(published.path)) == before


def test_a_version_appears_whole_or_not_at_all(make_publisher, root, weights):
    publisher = make_publisher(shard_bytes=1)
    seen = []

    def tensors():
        for name, tensor in weights.items():
            yield name, tensor
            seen.append((list_versions(root), publisher.latest(), publisher.locate(4)))

    meta = publisher.publish(4, tensors())
    assert {(tuple(versions), latest) for versions, latest, _ in seen} == {((), None)}
    assert {located for _, _, located in seen} == {meta}
    assert list_versions(root) == [4]
    assert publisher.latest() == 4
    assert not list(root.glob(f"{STAGING_PREFIX}*"))


def test_what_raises_midway_leaves_nothing(make_publisher, root, weights):
    def tensors():
        yield from weights.items()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        make_publisher(shard_bytes=1).publish(4, tensors())
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("tensors", [{}, {"ints": torch.ones(2, dtype=torch.int64)}], ids=str)
def test_what_is_no_weights_is_refused(make_publisher, root, tensors):
    with pytest.raises(SyncError):
        make_publisher().publish(1, tensors.items())
    assert list(root.iterdir()) == []


def test_a_root_that_went_away_is_a_sync_error(make_publisher, root, weights):
    publisher = make_publisher()
    root.rmdir()
    with pytest.raises(SyncError, match="cannot publish version 1"):
        publisher.publish(1, weights.items())


def test_a_version_without_a_manifest_is_none(published, reader, shapes):
    (Path(published.path) / MANIFEST_NAME).unlink()
    with pytest.raises(SyncError, match="no readable manifest"):
        reader.stage(published, shapes)


def test_staging_directories_and_strangers_are_not_listed(root, published):
    for name in (f"{STAGING_PREFIX}v00000009-1", "v9", "v00000010.bak", "latest"):
        (root / name).mkdir()
    assert list_versions(root) == [7]
    assert list_versions(root / "nowhere") == []


def test_large_version_numbers_keep_their_order(make_publisher, root):
    publisher = make_publisher()
    for version in (100_000_000, 2, 99_999_999):
        publisher.publish(version, {"w": torch.ones(1)}.items())
    assert list_versions(root) == [2, 99_999_999, 100_000_000]
    assert publisher.latest() == 100_000_000


@pytest.mark.parametrize(
    ("keep", "committed", "left"),
    [
        (1, 5, [5, 6]),
        (2, 5, [4, 5, 6]),
        (3, 6, [4, 5, 6]),
        (3, 2, [1, 2, 3, 4, 5, 6]),  # nothing newer than the committed one is touched
        (9, 6, [1, 2, 3, 4, 5, 6]),
        (1, 0, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_collect_keeps_the_newest_and_never_deletes_the_committed(
    make_publisher, root, keep, committed, left
):
    publisher = make_publisher(keep)
    for version in range(1, 7):
        publisher.publish(version, {"w": torch.ones(1)}.items())
    deleted = publisher.collect(committed)
    assert list_versions(root) == left
    assert sorted([*deleted, *left]) == [1, 2, 3, 4, 5, 6]
    assert publisher.collect(committed) == []
    assert sorted(entry.name for entry in root.iterdir()) == [f"v{v:08d}" for v in left]


def test_the_manifest_names_every_tensor(published, weights):
    manifest = json.loads((Path(published.path) / MANIFEST_NAME).read_text())
    assert manifest["version"] == 7
    assert [entry["name"] for entry in manifest["tensors"]] == list(weights)
    assert {entry["dtype"] for entry in manifest["tensors"]} == {"float32"}
