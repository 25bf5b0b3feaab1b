"""Chains of differences: who holds the base reads little, who does not reads back to a full version."""

import json

import pytest
import torch

from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from tests.contract.weight_channel_suite import (
    LIMIT_S,
    Midway,
    assert_equal_bits,
    in_folders,
    kept,
    shapes_of,
    stage,
    weights,
)
from weight_sync.deadline import Deadline
from weight_sync.transports.disk import make_local_publisher

SHAPES = shapes_of(weights())


def step(tensors, seed):
    """As a training step: a few elements of some tensors move a bit."""
    random = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in tensors.items():
        moved[name] = tensor.detach().clone()
        if name.startswith("big") and tensor.numel():
            at = torch.randint(tensor.numel(), (50,), generator=random)
            moved[name].view(-1)[at] *= 1.001
    moved["matrix"] = moved["matrix"] + 1e-3
    return moved


def published(publisher, count, first=1):
    """Versions that follow one another: (metas, weights)."""
    given, metas, states = weights(), [], []
    for version in range(first, first + count):
        given = step(given, version)
        metas.append(publisher.publish(version, given.items()))
        states.append(given)
    return metas, states


def kinds(channel, versions):
    return [channel.files(version).manifest()["kind"] for version in versions]


@kept
def test_a_server_that_holds_the_base_follows_every_version(channel):
    publisher, receiver = channel.publisher(delta={}), channel.receiver()
    metas, states = published(publisher, 4)
    assert kinds(channel, range(1, 5)) == ["full", "delta", "delta", "delta"]
    for meta, state in zip(metas, states, strict=True):
        staged = stage(receiver, meta, SHAPES)
        assert staged.digest == meta.digest
        assert_equal_bits(staged.tensors, state)
        receiver.keep(staged)


@kept
def test_only_the_difference_is_read_by_whoever_holds_the_base(channel):
    publisher, receiver = channel.publisher(delta={}), channel.receiver()
    metas, states = published(publisher, 2)
    receiver.keep(stage(receiver, metas[0], SHAPES))
    for name in channel.files(1).names():
        channel.files(1).delete(name)
    assert_equal_bits(stage(receiver, metas[1], SHAPES).tensors, states[1])
    sizes = [entry["size"] for entry in channel.files(2).manifest()["tensors"]]
    assert sum(sizes) < sum(tensor.nbytes for tensor in states[1].values()) / 20


@kept
def test_a_server_that_missed_a_version_reads_what_lies_between(channel):
    publisher, receiver = channel.publisher(delta={}), channel.receiver()
    metas, states = published(publisher, 4)
    receiver.keep(stage(receiver, metas[0], SHAPES))
    for name in channel.files(1).names():
        channel.files(1).delete(name)
    staged = stage(receiver, metas[3], SHAPES)
    assert staged.digest == metas[3].digest
    assert_equal_bits(staged.tensors, states[3])


@kept
def test_a_server_that_starts_afresh_reads_the_chain(channel):
    publisher = channel.publisher(delta={})
    metas, states = published(publisher, 4)
    staged = stage(channel.receiver(), metas[3], SHAPES)
    assert staged.digest == metas[3].digest
    assert_equal_bits(staged.tensors, states[3])


@kept
def test_a_delta_is_staged_while_it_is_written(channel):
    publisher, receiver = channel.publisher(delta={}), channel.receiver()
    metas, states = published(publisher, 1)
    receiver.keep(stage(receiver, metas[0], SHAPES))
    given = step(states[0], 2)
    tensors = Midway(given)
    meta = publisher.announce(2)
    staging = channel.start(stage, receiver, meta, SHAPES)
    publishing = channel.start(publisher.publish, 2, tensors)
    assert tensors.reached.wait(LIMIT_S)
    tensors.goes_on.set()
    assert publishing.result(LIMIT_S).digest == staging.result(LIMIT_S).digest
    assert_equal_bits(staging.result(LIMIT_S).tensors, given)
    assert kinds(channel, [2]) == ["delta"]


@kept
def test_a_delta_has_the_digest_of_the_whole_version(channel, tmp_path):
    metas, states = published(channel.publisher(delta={}), 3)
    whole = make_local_publisher(str(tmp_path / "whole"))
    assert whole.publish(3, states[2].items()).digest == metas[2].digest
    whole.close()


@kept
def test_nothing_changed_is_a_version_too(channel):
    publisher, given = channel.publisher(delta={}), weights()
    metas = [publisher.publish(version, given.items()) for version in (1, 2)]
    assert {entry["codec"] for entry in channel.files(2).manifest()["tensors"]} <= {"same", "raw"}
    for receiver in (channel.receiver(), holder(channel, metas[0])):
        staged = stage(receiver, metas[1], SHAPES)
        assert staged.version == 2
        assert_equal_bits(staged.tensors, given)


def holder(channel, meta):
    receiver = channel.receiver()
    receiver.keep(stage(receiver, meta, SHAPES))
    return receiver


@kept
def test_every_nth_version_is_whole(channel):
    publisher = channel.publisher(delta={"full_every": 3})
    published(publisher, 7)
    assert kinds(channel, range(1, 8)) == [
        "full", "delta", "delta", "full", "delta", "delta", "full",
    ]  # fmt: skip


@kept
def test_a_new_publisher_begins_with_a_whole_version(channel):
    metas, _ = published(channel.publisher(delta={}), 2)
    channel.close_publishers()
    publisher = channel.publisher(delta={})
    given = weights()
    meta = publisher.publish(metas[-1].version + 1, given.items())
    assert kinds(channel, [1, 2, 3]) == ["full", "delta", "full"]
    assert_equal_bits(stage(channel.receiver(), meta, SHAPES).tensors, given)


@kept
def test_after_a_publication_that_failed_a_whole_version_follows(channel):
    publisher = channel.publisher(delta={})
    _, states = published(publisher, 2)
    tensors = Midway(step(states[1], 3), RuntimeError("out of memory"))
    tensors.goes_on.set()
    with pytest.raises(RuntimeError):
        publisher.publish(3, tensors)
    given = step(states[1], 4)
    meta = publisher.publish(3, given.items())
    assert kinds(channel, [3]) == ["full"]
    assert_equal_bits(stage(channel.receiver(), meta, SHAPES).tensors, given)


@kept
def test_a_base_of_other_weights_is_not_built_upon(channel, tmp_path):
    metas, states = published(channel.publisher(delta={}), 2)
    other = make_local_publisher(str(tmp_path / "other"))
    strangers = {name: tensor.detach() + 1 for name, tensor in states[0].items()}
    foreign = other.publish(1, strangers.items())
    receiver = channel.receiver(allow=(channel.config().origin, str(tmp_path / "other")))
    receiver.keep(stage(receiver, foreign, SHAPES))  # the right number with another digest
    assert_equal_bits(stage(receiver, metas[1], SHAPES).tensors, states[1])
    other.close()


@kept
def test_a_base_with_a_wrong_digest_is_refused(channel):
    metas, _ = published(channel.publisher(delta={}), 2)

    def edit(tree):
        tree["base"]["digest"] = "0" * 64

    channel.files(2).edit_manifest(edit)
    for receiver in (channel.receiver(), holder(channel, metas[0])):
        with pytest.raises(SyncError, match="announced was 000000000000"):
            stage(receiver, metas[1], SHAPES)


@kept
def test_a_version_that_builds_on_itself_or_a_newer_one_is_refused(channel):
    metas, _ = published(channel.publisher(delta={}), 3)
    for base in (2, 3):
        channel.files(2).edit_manifest(lambda tree, base=base: tree["base"].update(version=base))
        with pytest.raises(SyncError, match="is not older"):
            stage(channel.receiver(), metas[1], SHAPES)


@kept
def test_a_damaged_base_is_refused(channel):
    metas, _ = published(channel.publisher(delta={}), 2)
    channel.files(1).flip("big.1", 77)
    with pytest.raises(SyncError, match=r"big\.1 in .* has a wrong checksum"):
        stage(channel.receiver(), metas[1], SHAPES)


@kept
def test_a_damaged_difference_is_refused(channel):
    metas, _ = published(channel.publisher(delta={}), 2)
    receiver = holder(channel, metas[0])
    for position in (0, 9, channel.files(2).entry("big.1").size - 1):
        channel.files(2).flip("big.1", position)
        with pytest.raises(SyncError, match=r"big\.1 in .* (is damaged|has a wrong checksum)"):
            stage(receiver, metas[1], SHAPES)
        channel.files(2).flip("big.1", position)


@kept
def test_a_damaged_difference_is_mended_with_a_whole_tensor(channel, tmp_path):
    metas, states = published(channel.publisher(delta={}), 2)
    peer = make_local_publisher(str(tmp_path / "peer"))
    whole = peer.publish(2, states[1].items())
    peer.close()
    channel.files(2).flip("big.1", 20)
    receiver = channel.receiver(allow=(channel.config().origin, str(tmp_path / "peer")))
    receiver.keep(stage(receiver, metas[0], SHAPES))
    told = WeightUpdateMeta(2, metas[1].path, metas[1].digest, (whole.path,))
    assert_equal_bits(stage(receiver, told, SHAPES).tensors, states[1])


@kept
def test_a_chain_whose_base_is_gone_is_replaced_by_a_holder(channel, tmp_path):
    metas, states = published(channel.publisher(delta={}), 2)
    peer = make_local_publisher(str(tmp_path / "peer"))
    whole = peer.publish(2, states[1].items())
    peer.close()
    for name in channel.files(1).names():
        channel.files(1).delete(name)
    receiver = channel.receiver(allow=(channel.config().origin, str(tmp_path / "peer")))
    with pytest.raises(SyncError, match="there is no version at"):
        stage(receiver, metas[1], SHAPES)
    told = WeightUpdateMeta(2, metas[1].path, metas[1].digest, (whole.path,))
    assert_equal_bits(stage(receiver, told, SHAPES).tensors, states[1])


@kept
def test_collect_never_deletes_what_a_kept_version_is_based_on(channel):
    publisher = channel.publisher(delta={"full_every": 3}, keep=1)
    metas, states = published(publisher, 5)  # full 1, 2, 3, full 4, 5
    assert publisher.collect(3) == []
    assert publisher.collect(5) == [1, 2, 3]
    assert_equal_bits(stage(channel.receiver(), metas[4], SHAPES).tensors, states[4])
    given = step(states[4], 6)
    meta = publisher.publish(6, given.items())
    assert kinds(channel, [6]) == ["delta"]
    assert_equal_bits(stage(channel.receiver(), meta, SHAPES).tensors, given)


@in_folders
def test_an_engine_that_reads_files_gets_a_delta_as_a_whole_folder(channel, tmp_path):
    metas, states = published(channel.publisher(delta={}), 2)
    receiver = channel.receiver(cache_dir=str(tmp_path / "cache"))
    for meta, state in zip(metas, states, strict=True):
        proven = receiver.within(Deadline(LIMIT_S)).verify(meta, SHAPES)
        receiver.keep(proven)
        assert (proven.version, proven.digest) == (meta.version, meta.digest)
        manifest = json.loads((proven.folder / "manifest.json").read_text())
        assert manifest["kind"] == "full"
        assert {entry["name"] for entry in manifest["tensors"]} == set(state)
