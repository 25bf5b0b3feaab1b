"""Directories of differences as other trainers write them, read by a server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from tests.unit.weight_sync.foreign_store import ForeignStore, Tensors, save_start
from weight_sync.checkpoint_deltas import (
    _DECODERS,
    INDEX_NAME,
    checksum_of,
    encode,
    read_delta,
)
from weight_sync.deadline import Deadline
from weight_sync.receiver import Receiver, make_receiver

SHARD = "model-00000-of-00001.safetensors"
ENCODINGS = ("xor", "overwrite")


def weights(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(6, 4, generator=generator).bfloat16(),
        "norm": torch.randn(4, generator=generator),
        "fixed": torch.ones(3),
    }


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return save_start(tmp_path / "start", weights(0))


@pytest.fixture
def receiver(tmp_path: Path, start: Path) -> Iterator[Receiver]:
    """It may read the store alone; its own start is its own."""
    config = ReceiverConfig(allow=(str(tmp_path / "store"),), cache_dir=str(tmp_path / "cache"))
    with closing(make_receiver(config, str(start))) as made:
        yield made


@pytest.fixture
def store(tmp_path: Path) -> ForeignStore:
    return ForeignStore(tmp_path / "store", weights(0))


def stage(receiver: Receiver, folder: Path, version: int = 9):
    meta = WeightUpdateMeta(version, f"model://{folder}")
    expected = {name: tensor.shape for name, tensor in weights(0).items()}
    return receiver.within(Deadline(10.0)).stage(meta, expected)


def is_equal(found, wanted: Tensors) -> bool:
    return found.tensors.keys() == wanted.keys() and all(
        torch.equal(found.tensors[name], wanted[name]) for name in wanted
    )


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
def test_a_chain_is_followed_from_the_start(receiver, store, encoding, checksum):
    store.encoding, store.checksum = encoding, checksum
    for seed in (1, 2, 3):
        folder = store.publish(weights(seed))
    assert is_equal(stage(receiver, folder), weights(3))


def test_what_serves_is_the_base_of_what_comes_next(receiver, store):
    receiver.keep(stage(receiver, store.publish(weights(1))))
    second = store.publish(weights(2))
    shutil.rmtree(store.folder(1))  # it would not be found again
    receiver.keep(staged := stage(receiver, second))
    assert is_equal(staged, weights(2))
    store.publish(weights(3))
    assert is_equal(stage(receiver, store.publish(weights(4))), weights(4))  # one was left out


def test_a_whole_version_begins_a_chain(receiver, store):
    store.publish(weights(1))
    store.publish(weights(2), is_whole=True)
    shutil.rmtree(store.folder(1))
    assert is_equal(stage(receiver, store.folder(2)), weights(2))
    assert is_equal(stage(receiver, store.publish(weights(3))), weights(3))


def test_the_same_place_may_hold_what_another_run_wrote(receiver, store, tmp_path):
    receiver.keep(stage(receiver, store.publish(weights(1))))
    shutil.rmtree(store.root)
    again = ForeignStore(store.root, weights(0))
    again.publish(weights(5) | {"fixed": torch.zeros(3)})
    last = weights(6) | {"fixed": torch.zeros(3)}
    assert is_equal(stage(receiver, again.publish(last)), last)


def test_an_engine_that_reads_files_gets_a_whole_directory(receiver, store):
    expected = {name: tensor.shape for name, tensor in weights(0).items()}
    for seed in (1, 2):
        meta = WeightUpdateMeta(seed, f"model://{store.publish(weights(seed))}")
        verified = receiver.within(Deadline(10.0)).verify(meta, expected)
        receiver.keep(verified)
        shutil.rmtree(store.folder(seed - 1), ignore_errors=True)
    assert verified.digest == stage(receiver, store.folder(2)).digest
    assert list(verified.folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-9]), "torn"),
        (lambda f: (f / SHARD).unlink(), "cannot be read"),
        (lambda f: flip(f / SHARD, -3), "damaged"),
        (lambda f: change(f, "delta_encoding", "diff"), "delta_encoding"),
        (lambda f: change(f, "checksum_format", "crc"), "checksum_format"),
        (lambda f: change(f, "compression_format", "gzip"), "compression_format"),
        (lambda f: change(f, "base_version", "000002"), "not older"),
        (lambda f: change(f, "base_version", "many"), "base_version"),
        (lambda f: (f / INDEX_NAME).write_text("{"), "index"),
    ],
    ids=[
        "torn",
        "gone",
        "flipped",
        "encoding",
        "checksum",
        "compression",
        "later",
        "word",
        "index",
    ],
)
def test_damage_is_refused_and_can_be_repaired(receiver, store, harm, message):
    store.publish(weights(1))
    folder = store.publish(weights(2))
    kept = {file: file.read_bytes() for file in folder.iterdir()}
    harm(folder)
    with pytest.raises(SyncError, match=message):
        stage(receiver, folder)
    for file, content in kept.items():
        file.write_bytes(content)
    assert is_equal(stage(receiver, folder), weights(2))


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 255
    file.write_bytes(content)


def change(folder: Path, field: str, value: str) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    index["metadata"][field] = value
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_a_base_that_is_nowhere_is_named(tmp_path, store):
    stranger = make_receiver(ReceiverConfig(allow=(str(store.root),)))
    with pytest.raises(SyncError, match="builds on version 0, which neither serves here"):
        stage(stranger, store.publish(weights(1)))


def test_a_base_of_other_weights_is_found_out(receiver, store, start):
    save_file(weights(7), start / "model.safetensors")
    with pytest.raises(SyncError, match="builds on other weights"):
        stage(receiver, store.publish(weights(1)))


@pytest.mark.parametrize("is_whole", [False, True])
def test_values_that_are_not_finite_are_not_served(receiver, store, is_whole):
    sick = weights(1)
    sick["norm"][2] = float("inf")
    with pytest.raises(SyncError, match="1 of 4 values of norm are NaN or infinite"):
        stage(receiver, store.publish(sick, is_whole))


def test_strangers_are_refused_and_tied_weights_are_none(receiver, store):
    store._last |= {"head": weights(0)["embed"], "other": torch.zeros(2)}
    tied = weights(1) | {"head": weights(1)["embed"], "other": torch.zeros(2)}
    assert is_equal(stage(receiver, store.publish(tied)), weights(1))
    with pytest.raises(SyncError, match="it changes other"):
        stage(receiver, store.publish(tied | {"other": torch.ones(2)}))


@given(old=st.binary(max_size=80), new=st.binary(max_size=80), encoding=st.sampled_from(ENCODINGS))
def test_what_was_encoded_is_decoded(old, new, encoding):
    size = min(len(old), len(new))
    before, after = (torch.tensor(list(each[:size]), dtype=torch.uint8) for each in (old, new))
    frame = encode(after, before, encoding)
    assert (frame is None) == (old[:size] == new[:size])
    if frame is not None:
        assert bytes(_DECODERS[encoding](frame.tobytes(), before.numpy())) == new[:size]


@given(frame=st.binary(max_size=200), encoding=st.sampled_from(ENCODINGS))
def test_no_frame_makes_more_than_its_tensor(frame, encoding):
    old = torch.zeros(8, dtype=torch.uint8).numpy()
    for each in (frame, zstandard.compress(frame), zstandard.compress(bytes(10_000))):
        with suppress(ValueError, zstandard.ZstdError):
            assert _DECODERS[encoding](each, old).nbytes == 8


def test_a_directory_without_metadata_is_whole(tmp_path, store):
    folder = store.publish(weights(1), is_whole=True)
    assert read_delta(folder) is None
    assert read_delta(tmp_path) is None


def test_blake3_wants_its_package():
    try:
        import blake3  # noqa: F401
    except ImportError:
        with pytest.raises(SyncError, match="pip install blake3"):
            checksum_of(torch.zeros(1, dtype=torch.uint8).numpy(), "blake3")
