"""Plain Hugging Face directories as versions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from weight_sync.deadline import Deadline
from weight_sync.receiver import make_receiver
from weight_sync.tensors import weights_digest
from weight_sync.transports.disk import make_local_publisher
from weight_sync.transports.model_dir import INDEX_NAME, ModelDirReader

EMBED = "embed.weight"
Tensors = dict[str, torch.Tensor]
Shapes = dict[str, torch.Size]


@pytest.fixture
def weights() -> Tensors:
    return {
        EMBED: torch.arange(12, dtype=torch.float32).reshape(4, 3) / 7,
        "layer.0.bias": torch.tensor([1e-30, -0.0, 3.4e38]),
        "scale": torch.tensor(0.1),
        "empty": torch.empty(0, 3),
    }


@pytest.fixture
def shapes(weights: Tensors) -> Shapes:
    return {name: tensor.shape for name, tensor in weights.items()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    return folder


@pytest.fixture
def plain(root: Path) -> ModelDirReader:
    config = ReceiverConfig(allow=(str(root),))
    return ModelDirReader(config, make_receiver(config))


@pytest.fixture
def published(root: Path, weights: Tensors) -> WeightUpdateMeta:
    """Version 7 of ours."""
    publisher = make_local_publisher(str(root))
    meta = publisher.publish(7, weights.items())
    publisher.close()
    return meta


def write(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> WeightUpdateMeta:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return WeightUpdateMeta(3, str(folder))


def test_a_directory_gets_the_version_of_the_caller(
    plain: ModelDirReader, root: Path, weights: Tensors, shapes: Shapes
) -> None:
    meta = write(root / "m", weights)
    staged = plain.stage(meta, shapes)
    assert staged.version == 3
    assert staged.tensors.keys() == weights.keys()
    assert all(torch.equal(staged.tensors[name], weights[name]) for name in weights)
    proven = plain.verify(meta, shapes)
    assert (proven.version, proven.folder) == (3, root / "m")


def test_equal_digests_mean_equal_weights(
    plain: ModelDirReader, root: Path, weights: Tensors, shapes: Shapes
) -> None:
    digest = plain.stage(write(root / "a", weights), shapes).digest
    assert plain.stage(write(root / "b", weights), shapes).digest == digest
    weights[EMBED][0, 0] += 1
    assert plain.stage(write(root / "b", weights), shapes).digest != digest


def test_shards_are_read_with_and_without_an_index(
    plain: ModelDirReader, root: Path, weights: Tensors, shapes: Shapes
) -> None:
    first, *rest = weights
    write(root / "m", {first: weights[first]}, "model-1.safetensors")
    meta = write(root / "m", {name: weights[name] for name in rest}, "model-2.safetensors")
    whole = plain.stage(meta, shapes).digest
    named = {name: f"model-{1 if name == first else 2}.safetensors" for name in weights}
    (root / "m" / INDEX_NAME).write_text(json.dumps({"weight_map": named}))
    write(root / "m", {first: weights[first] + 1}, "consolidated.safetensors")  # not in the index
    assert plain.stage(meta, shapes).digest == whole
    (root / "m" / INDEX_NAME).unlink()
    with pytest.raises(SyncError, match="two files"):
        plain.stage(meta, shapes)


def test_what_was_staged_outlives_its_files(
    plain: ModelDirReader, root: Path, weights: Tensors, shapes: Shapes
) -> None:
    staged = plain.stage(write(root / "m", weights), shapes)
    file = root / "m" / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(staged.tensors[EMBED], weights[EMBED])


def test_a_tied_weight_may_come_twice_if_it_is_the_same(
    plain: ModelDirReader, root: Path, weights: Tensors, shapes: Shapes
) -> None:
    meta = write(root / "m", {**weights, "lm_head.weight": weights[EMBED].clone()})
    assert plain.stage(meta, shapes).tensors.keys() == shapes.keys()
    assert plain.verify(meta, shapes).version == 3
    write(root / "m", {**weights, "lm_head.weight": weights[EMBED] + 1})
    for read in (plain.stage, plain.verify):
        with pytest.raises(SyncError, match=r"extra.*lm_head"):
            read(meta, shapes)


def test_buffers_of_old_checkpoints_are_left_out(
    plain: ModelDirReader, root: Path, weights: Tensors, shapes: Shapes
) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    staged = plain.stage(write(root / "m", {**weights, **buffer}), shapes)
    assert staged.tensors.keys() == shapes.keys()


def test_a_version_of_ours_is_proven_and_takes_the_callers_number(
    plain: ModelDirReader, published: WeightUpdateMeta, shapes: Shapes
) -> None:
    meta = WeightUpdateMeta(12, published.path)
    assert plain.stage(meta, shapes).version == 12
    assert plain.verify(meta, shapes).version == 12
    shard = next(Path(published.path).glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    for read in (plain.stage, plain.verify):
        with pytest.raises(SyncError, match="checksum"):
            read(meta, shapes)


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def point_outside(folder: Path) -> None:
    outside = folder.parent.parent / "secret.safetensors"
    (folder / "model.safetensors").replace(outside)
    (folder / "model.safetensors").symlink_to(outside)


def name_outside(folder: Path) -> None:
    outside = folder.parent.parent / "secret.safetensors"
    (folder / "model.safetensors").replace(outside)
    names = {"weight_map": {EMBED: "../../secret.safetensors"}}
    (folder / INDEX_NAME).write_text(json.dumps(names))


def spoil_index(folder: Path) -> None:
    (folder / INDEX_NAME).write_text('{"weight_map": [1]}')


def lose_shard(folder: Path) -> None:
    (folder / INDEX_NAME).write_text('{"weight_map": {"x": "gone.safetensors"}}')


def empty(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut, "torn"),
        (point_outside, "outside"),
        (name_outside, "outside"),
        (spoil_index, "not an index"),
        (lose_shard, "incomplete"),
        (empty, "no \\*.safetensors"),
    ],
)
def test_a_damaged_directory_is_refused(
    plain: ModelDirReader,
    root: Path,
    weights: Tensors,
    shapes: Shapes,
    damage: Callable[[Path], None],
    named: str,
) -> None:
    meta = write(root / "m", weights)
    damage(root / "m")
    for read in (plain.stage, plain.verify):
        with pytest.raises(SyncError, match=named):
            read(meta, shapes)


def test_another_model_is_refused(
    plain: ModelDirReader, root: Path, weights: Tensors, shapes: Shapes
) -> None:
    meta = write(root / "m", weights)
    more = {**shapes, "more": torch.Size([1])}
    fewer = {name: shape for name, shape in shapes.items() if name != "scale"}
    other = {**shapes, EMBED: torch.Size([3, 4])}
    for expected, named in ((more, "missing"), (fewer, "extra"), (other, "shapes")):
        for read in (plain.stage, plain.verify):
            with pytest.raises(SyncError, match=f"{named} \\['"):
                read(meta, expected)


@pytest.mark.parametrize("path", ["nowhere", "..", "/etc"])
def test_a_path_that_is_no_allowed_directory(
    plain: ModelDirReader, root: Path, shapes: Shapes, path: str
) -> None:
    with pytest.raises(SyncError):
        plain.stage(WeightUpdateMeta(1, str(root / path)), shapes)


def test_a_publisher_and_a_directory_of_the_same_weights_fit_the_same_model(
    plain: ModelDirReader,
    published: WeightUpdateMeta,
    root: Path,
    weights: Tensors,
    shapes: Shapes,
) -> None:
    ours, theirs = plain.stage(published, shapes), plain.stage(write(root / "m", weights), shapes)
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in shapes)


@pytest.mark.parametrize("way", ["stage", "verify"])
def test_a_published_directory_is_the_one_that_was_published(
    root: Path, weights: Tensors, shapes: Shapes, way: str
) -> None:
    """By its scheme a receiver reads it, too; later only with the same weights."""
    folder = root / "step-8"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    receiver = make_receiver(ReceiverConfig(allow=(str(root),)))
    read = getattr(receiver.within(Deadline(10.0)), way)
    path = f"model://{folder}"
    first = read(WeightUpdateMeta(3, path), shapes)
    assert (first.version, first.digest) == (3, weights_digest(weights))
    assert read(WeightUpdateMeta(3, path, digest=first.digest), shapes).digest == first.digest
    save_file(weights | {EMBED: weights[EMBED] + 1}, folder / "model.safetensors")
    with pytest.raises(SyncError, match="other weights than version 3 was published with"):
        read(WeightUpdateMeta(3, path, digest=first.digest), shapes)
    assert read(WeightUpdateMeta(4, path), shapes).digest != first.digest


def test_a_scheme_opens_no_other_directory(root: Path, shapes: Shapes) -> None:
    receiver = make_receiver(ReceiverConfig(allow=(str(root),)))
    for path in ("model:///etc", f"model://{root}/../elsewhere"):
        with pytest.raises(SyncError, match="outside"):
            receiver.within(Deadline(10.0)).stage(WeightUpdateMeta(3, path), shapes)
