"""What every transport of weights owes: a version, whole or not at all, or an error that says why."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress

import pytest
import torch

from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from tests.contract.weight_channel_suite import (
    KINDS,
    LIMIT_S,
    VERSION,
    Channel,
    Midway,
    assert_equal_bits,
    bits,
    every,
    kept,
    refusal,
    shapes_of,
    stage,
    weights,
)
from weight_sync.deadline import Deadline
from weight_sync.receiver import make_receiver


@every
def test_weights_arrive_bit_for_bit_at_every_server(channel):
    given = weights()
    meta, staged = channel.transfer(
        channel.publisher(), VERSION, given.items(), shapes_of(given), receivers=3
    )
    for one in staged:
        assert (one.version, one.digest) == (VERSION, meta.digest)
        assert_equal_bits(one.tensors, given)


@every
def test_a_publisher_brings_version_after_version(channel):
    publisher, receiver = channel.publisher(), channel.receiver()
    for version in (1, 2, 30):
        given = weights(seed=version)
        _, (staged,) = channel.transfer(
            publisher, version, given.items(), shapes_of(given), [receiver]
        )
        receiver.keep(staged)
        assert_equal_bits(staged.tensors, given)
        assert publisher.latest() == version
        assert receiver.held(version) is staged


def test_equal_weights_have_equal_digests_on_every_way(tmp_path):
    given = weights()
    digests = set()
    with ExitStack() as stack:
        for number, kind in enumerate(KINDS):
            for shard_bytes in (1 << 20, 64 << 20):
                folder = tmp_path / f"{number}-{shard_bytes}"
                channel = stack.enter_context(Channel(kind, folder))
                publisher = channel.publisher(shard_bytes=shard_bytes)
                ordered = given if number % 2 else dict(reversed(given.items()))
                meta, (staged,) = channel.transfer(
                    publisher, VERSION, ordered.items(), shapes_of(given)
                )
                digests |= {meta.digest, staged.digest}
    assert len(digests) == 1


@every
def test_other_weights_or_versions_have_other_digests(channel):
    publisher, given = channel.publisher(), weights()
    changed = {**given, "scalar": given["scalar"] + 1e-6}
    digests = {
        channel.transfer(publisher, version, tensors.items(), shapes_of(given))[0].digest
        for version, tensors in ((1, given), (2, given), (3, changed))
    }
    assert len(digests) == 3


@every
def test_weights_are_cast_renamed_and_skipped_on_their_way_out(channel):
    given = weights()
    publisher = channel.publisher(
        dtype="bfloat16", skip=("shared.row",), rename={"big.*": "layers.*", "scalar": "factor"}
    )
    wanted = {
        name.replace("big.", "layers.").replace("scalar", "factor"): tensor.to(torch.bfloat16)
        for name, tensor in given.items()
        if name != "shared.row"
    }
    _, (staged,) = channel.transfer(publisher, VERSION, given.items(), shapes_of(wanted))
    assert_equal_bits(staged.tensors, wanted)


@pytest.mark.parametrize("quantization", ["int8", "float8_e4m3fn"])
@every
def test_quantized_weights_are_equal_on_every_server(channel, quantization):
    given = weights()
    meta, staged = channel.transfer(
        channel.publisher(quantization=quantization),
        VERSION,
        given.items(),
        shapes_of(given),
        receivers=2,
    )
    assert_equal_bits(staged[0].tensors, staged[1].tensors)
    assert {one.digest for one in staged} == {meta.digest}
    assert staged[0].tensors["matrix"].allclose(given["matrix"], atol=0.2, rtol=0.1)
    assert bits(staged[0].tensors["big.0"]) == bits(given["big.0"])  # no matrix: as it is


def test_quantized_weights_are_equal_on_every_way(tmp_path):
    given = weights()
    digests = set()
    with ExitStack() as stack:
        for number, kind in enumerate(KINDS):
            channel = stack.enter_context(Channel(kind, tmp_path / str(number)))
            publisher = channel.publisher(quantization="int8")
            meta, _ = channel.transfer(publisher, VERSION, given.items(), shapes_of(given))
            digests.add(meta.digest)
    assert len(digests) == 1


@every
def test_a_server_takes_part_before_and_while_a_version_is_made(channel):
    publisher, given = channel.publisher(), weights()
    early, late = channel.receiver(), channel.receiver()
    metas = channel.seated(publisher.announce(VERSION), 2)
    tensors = Midway(given)
    first = channel.start(stage, early, metas[0], shapes_of(given))
    publishing = channel.start(publisher.publish, VERSION, tensors)
    assert tensors.reached.wait(LIMIT_S)
    second = channel.start(stage, late, metas[1], shapes_of(given))
    tensors.goes_on.set()
    digest = publishing.result(LIMIT_S).digest
    for staging in (first, second):
        staged = staging.result(LIMIT_S)
        assert staged.digest == digest
        assert_equal_bits(staged.tensors, given)


@kept
def test_a_server_that_comes_later_finds_the_version(channel):
    publisher, given = channel.publisher(), weights()
    meta = publisher.publish(VERSION, given.items())
    for told in (meta, WeightUpdateMeta(VERSION, meta.path)):
        staged = stage(channel.receiver(), told, shapes_of(given))
        assert staged.digest == meta.digest
        assert_equal_bits(staged.tensors, given)


@every
def test_giving_up_ends_a_server_that_waits(channel):
    publisher, given = channel.publisher(), weights()
    (meta,) = channel.seated(publisher.announce(VERSION), 1)
    deadline = Deadline(1e6)
    staging = channel.start(stage, channel.receiver(), meta, shapes_of(given), deadline)
    deadline.cancel("the gateway went on without it")
    with pytest.raises(SyncError, match="the gateway went on without it"):
        staging.result(LIMIT_S)


@kept
def test_giving_up_ends_a_server_that_has_read_a_part(channel):
    publisher, given = channel.publisher(), weights()
    meta = publisher.announce(VERSION)
    deadline, tensors = Deadline(1e6), Midway(given)
    publishing = channel.start(publisher.publish, VERSION, tensors)
    assert tensors.reached.wait(LIMIT_S)
    staging = channel.start(stage, channel.receiver(), meta, shapes_of(given), deadline)
    deadline.cancel("the gateway went on without it")
    with pytest.raises(SyncError, match="the gateway went on without it"):
        staging.result(LIMIT_S)
    tensors.goes_on.set()
    assert publishing.result(LIMIT_S).version == VERSION


@every
def test_a_deadline_ends_without_progress(channel):
    publisher, given = channel.publisher(), weights()
    (meta,) = channel.seated(publisher.announce(VERSION), 1)
    with pytest.raises(SyncError, match=r"no progress for 0\.2 s"):
        stage(channel.receiver(), meta, shapes_of(given), Deadline(0.2))


@every
def test_a_refused_version_is_not_published(channel):
    publisher, given = channel.publisher(), weights()
    publisher.announce(VERSION)
    publisher.follow(VERSION, refusal("an epoch came between"))
    with pytest.raises(SyncError, match="was refused: an epoch came between"):
        publisher.publish(VERSION, given.items())
    assert publisher.latest() is None
    _, (staged,) = channel.transfer(publisher, VERSION + 1, given.items(), shapes_of(given))
    assert_equal_bits(staged.tensors, given)


@every
def test_a_late_refusal_ends_no_later_attempt_of_the_same_number(channel):
    publisher, given = channel.publisher(), weights()
    decision: Future[int] = Future()
    publisher.announce(VERSION)
    publisher.follow(VERSION, decision)
    with pytest.raises(SyncError, match="1 of 1 values of sick"):
        publisher.publish(VERSION, [("sick", torch.tensor([torch.nan]))])

    def told_late() -> Iterator[tuple[str, torch.Tensor]]:
        decision.set_exception(SyncError("its trainer said so"))
        yield from given.items()

    _, (staged,) = channel.transfer(publisher, VERSION, told_late(), shapes_of(given))
    assert_equal_bits(staged.tensors, given)


@every
def test_a_version_is_refused_while_it_is_gathered(channel):
    publisher, tensors = channel.publisher(), Midway(weights())
    publisher.announce(VERSION)
    publishing = channel.start(publisher.publish, VERSION, tensors)
    assert tensors.reached.wait(LIMIT_S)
    publisher.follow(VERSION - 1, refusal("another one"))
    publisher.follow(VERSION, refusal("an epoch came between"))
    tensors.goes_on.set()
    with pytest.raises(SyncError, match="was refused: an epoch came between"):
        publishing.result(LIMIT_S)
    assert publisher.latest() is None


@every
def test_a_version_is_published_once(channel):
    publisher, given = channel.publisher(), weights()
    channel.transfer(publisher, VERSION, given.items(), shapes_of(given))
    with pytest.raises(SyncError, match="take a newer number"):
        publisher.announce(VERSION)
    with pytest.raises(SyncError, match="take a newer number"):
        publisher.publish(VERSION, weights(seed=1).items())
    assert publisher.latest() == VERSION


@kept
def test_what_was_published_stays_when_it_is_published_again(channel):
    given = weights()
    meta = channel.publisher().publish(VERSION, given.items())
    before = channel.files().manifest()
    with pytest.raises(SyncError, match="take a newer number"):
        channel.restarted(meta).publish(VERSION, weights(seed=1).items())
    assert channel.files().manifest() == before
    assert_equal_bits(stage(channel.receiver(), meta, shapes_of(given)).tensors, given)


@every
def test_what_raises_midway_is_no_version_and_the_next_one_is(channel):
    publisher, given = channel.publisher(), weights()
    tensors = Midway(given, RuntimeError("out of memory"))
    tensors.goes_on.set()
    with pytest.raises(RuntimeError, match="out of memory"):
        publisher.publish(VERSION, tensors)
    assert publisher.latest() is None
    meta, (staged,) = channel.transfer(publisher, VERSION, given.items(), shapes_of(given))
    assert staged.digest == meta.digest
    assert_equal_bits(staged.tensors, given)


@kept
def test_no_server_mixes_a_failed_attempt_with_the_next(channel):
    publisher, given = channel.publisher(), weights(seed=1)
    meta = publisher.announce(VERSION)
    tensors = Midway(weights(seed=0), RuntimeError("out of memory"))
    publishing = channel.start(publisher.publish, VERSION, tensors)
    staging = channel.start(stage, channel.receiver(), meta, shapes_of(given))
    assert tensors.reached.wait(LIMIT_S)
    tensors.goes_on.set()
    with pytest.raises(RuntimeError, match="out of memory"):
        publishing.result(LIMIT_S)
    published = publisher.publish(VERSION, given.items())
    try:
        staged = staging.result(LIMIT_S)
    except SyncError:
        return  # it read a part of the first attempt, and noticed
    assert staged.digest == published.digest
    assert_equal_bits(staged.tensors, given)


@kept
def test_what_is_still_written_is_no_version(channel):
    publisher, tensors = channel.publisher(), Midway(weights())
    publishing = channel.start(publisher.publish, VERSION, tensors)
    assert tensors.reached.wait(LIMIT_S)
    assert publisher.latest() is None
    assert publisher.collect(VERSION + 1) == []
    tensors.goes_on.set()
    publishing.result(LIMIT_S)
    assert publisher.latest() == VERSION


@every
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "a version needs tensors"),
        ({"ids": torch.ones(2, dtype=torch.int64)}, r"ids is of type torch\.int64"),
        ({"w": torch.ones(2), "ids": torch.ones(1, dtype=torch.bool)}, "ids is of type torch.bool"),
        (
            {"w": torch.ones(2), "sick": torch.tensor([1.0, float("nan")])},
            "version 7: 1 of 2 values of sick are NaN or infinite",
        ),
    ],
    ids=["nothing", "integers", "booleans", "not finite"],
)
def test_what_is_no_weight_is_not_published(channel, tensors, message):
    publisher, given = channel.publisher(), weights()
    with pytest.raises(SyncError, match=message):
        publisher.publish(VERSION, tensors.items())
    assert publisher.latest() is None
    channel.transfer(publisher, VERSION, given.items(), shapes_of(given))


@every
def test_two_parameters_do_not_end_under_one_name(channel):
    publisher = channel.publisher(rename={"big.1": "big.0"})
    with pytest.raises(SyncError, match=r"big\.1 and big\.0 would both be published as big\.0"):
        publisher.publish(VERSION, weights().items())
    assert publisher.latest() is None


@kept
def test_weights_of_another_model_are_refused_by_name(channel):
    given = weights()
    meta = channel.publisher().publish(VERSION, given.items())
    shapes = shapes_of(given)
    receiver = channel.receiver()
    for expected, message in (
        (shapes | {"head.weight": torch.Size([2])}, r"missing \['head\.weight'\], extra \[\]"),
        (
            {name: shape for name, shape in shapes.items() if name != "scalar"},
            r"missing \[\], extra \['scalar'\]",
        ),
        (shapes | {"matrix": torch.Size([24, 16])}, r"matrix has shape \(16, 24\), \(24, 16\)"),
    ):
        with pytest.raises(SyncError, match=message):
            stage(receiver, meta, expected)
    assert stage(receiver, meta, shapes).digest == meta.digest


def test_an_announced_stream_of_another_model_is_refused_by_name(tmp_path):
    given = weights()
    with Channel(KINDS[-1], tmp_path) as channel:
        publisher = channel.publisher()
        metas = channel.seated(publisher.announce(VERSION), 2)
        expected = shapes_of(given) | {"matrix": torch.Size([24, 16])}
        bad = channel.start(stage, channel.receiver(), metas[0], expected)
        good = channel.start(stage, channel.receiver(), metas[1], shapes_of(given))

        def until_refused() -> Iterator[tuple[str, torch.Tensor]]:
            """Not all of it before a server has refused what it is of."""
            *first, last = given.items()
            yield from first
            bad.exception(LIMIT_S)
            yield last

        publishing = channel.start(publisher.publish, VERSION, until_refused())
        with pytest.raises(SyncError, match=r"matrix has shape \(16, 24\), \(24, 16\)"):
            bad.result(LIMIT_S)
        publisher.follow(VERSION, refusal("a server refused it"))
        for future in (good, publishing):
            assert isinstance(future.exception(LIMIT_S), SyncError)


@kept
def test_another_version_than_announced_is_refused(channel):
    given = weights()
    meta = channel.publisher().publish(VERSION, given.items())
    with pytest.raises(SyncError, match=f"holds version {VERSION}, not 8"):
        stage(channel.receiver(), WeightUpdateMeta(8, meta.path), shapes_of(given))


@kept
def test_another_digest_than_announced_is_refused(channel):
    given = weights()
    meta = channel.publisher().publish(VERSION, given.items())
    with pytest.raises(SyncError, match="announced was 000000000000"):
        stage(channel.receiver(), WeightUpdateMeta(VERSION, meta.path, "0" * 64), shapes_of(given))


@kept
def test_there_is_no_version_where_none_was_announced(channel):
    publisher = channel.publisher()
    path = publisher.announce(VERSION).path.replace("v00000007", "v00000009")
    with pytest.raises(SyncError, match="there is no version at"):
        stage(channel.receiver(), WeightUpdateMeta(9, path), {})


@every
def test_a_place_that_is_not_allowed_is_not_read(channel):
    publisher, given = channel.publisher(), weights()
    (meta,) = channel.seated(publisher.announce(VERSION), 1)
    for allow in ((), ("/somewhere/else", "s3://bucket", "http://other:1", "gloo://other:")):
        receiver = make_receiver(ReceiverConfig(allow=allow))
        with pytest.raises(SyncError, match="outside of what this server takes weights from"):
            stage(receiver, meta, shapes_of(given))


@kept
def test_weights_outlive_their_files(channel):
    publisher, given = channel.publisher(keep=1), weights()
    staged = stage(channel.receiver(), publisher.publish(VERSION, given.items()), shapes_of(given))
    for version in (8, 9, 10):  # memory that is used again is not taken from under a server
        publisher.publish(version, weights(seed=version).items())
        publisher.collect(version)
    assert not channel.files().names()
    assert_equal_bits(staged.tensors, given)


@kept
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
def test_collect_keeps_the_newest_and_never_deletes_the_committed(channel, keep, committed, left):
    publisher = channel.publisher(keep=keep)
    for version in range(1, 7):
        publisher.publish(version, {"w": torch.ones(1)}.items())
    deleted = publisher.collect(committed)
    assert [version for version in range(1, 7) if channel.files(version).names()] == left
    assert sorted([*deleted, *left]) == [1, 2, 3, 4, 5, 6]
    assert publisher.collect(committed) == []


@kept
def test_large_version_numbers_keep_their_order(channel):
    publisher = channel.publisher(keep=1)
    for version in (2, 99_999_999, 100_000_000):
        publisher.publish(version, {"w": torch.ones(1)}.items())
    assert publisher.latest() == 100_000_000
    assert publisher.collect(100_000_000) == [2, 99_999_999]


@every
def test_a_server_stages_no_value_that_is_not_finite_whoever_published_it(channel, monkeypatch):
    for publisher in ("weight_sync.publisher", "weight_sync.transports.collective_publisher"):
        monkeypatch.setattr(f"{publisher}.check_finite", lambda *_: None)
    given = {"fine": torch.ones(4), "sick": torch.tensor([1.0, float("inf"), float("nan")])}
    publisher = channel.publisher()
    [meta] = channel.seated(publisher.announce(VERSION), 1)
    staging = channel.start(stage, channel.receiver(), meta, shapes_of(given))
    publishing = channel.start(publisher.publish, VERSION, given.items())
    with pytest.raises(SyncError, match=r": 2 of 3 values of sick are NaN or infinite"):
        staging.result(LIMIT_S)
    publisher.follow(
        VERSION, refusal("the only server refused it")
    )  # as its trainer would, told by the gateway
    with suppress(SyncError):
        publishing.result(LIMIT_S)
