from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from headway.contracts.errors import ConfigError, DataError, UnknownName
from trainer.workers.data_proto import DataProto
from trainer.workers.dispatch import (
    MODES,
    Dispatch,
    Dispatched,
    DispatchMode,
    Execute,
    MeshPlace,
    WorkerCall,
    mesh_mode,
    register,
    register_dispatch_mode,
    registered_methods,
)
from trainer.workers.worker import Worker


@dataclass
class Group:
    world_size: int = 2
    auto_pad: bool = True
    places: list[MeshPlace] = field(default_factory=list)

    def mesh(self, name):
        return self.places


def rows(size, **meta):
    return DataProto.of(meta, x=torch.arange(size))


def through(mode, group, *args, function=lambda call: call.args[0], **kwargs):
    """The calls, and what comes of them where every worker does `function`."""
    mode = mode if isinstance(mode, DispatchMode) else MODES.get(mode)
    cut = mode.dispatch(group, args, kwargs)
    assert len(cut.calls) == group.world_size
    return cut.calls, mode.collect(group, cut, [function(call) for call in cut.calls])


def test_one_to_all_and_all_to_all_give_every_worker_the_same():
    for mode in (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL):
        calls, result = through(mode, Group(3), 5, b=6)
        assert calls == [WorkerCall((5,), {"b": 6})] * 3
        assert result == [5, 5, 5]


def test_dp_compute_wants_an_entry_for_each():
    calls, result = through(Dispatch.DP_COMPUTE, Group(2), [1, 2], b=[3, 4])
    assert calls == [WorkerCall((1,), {"b": 3}), WorkerCall((2,), {"b": 4})]
    assert result == [1, 2]
    with pytest.raises(DataError, match="argument 0 is 3, wanted is a list"):
        through(Dispatch.DP_COMPUTE, Group(2), [1, 2, 3])


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8])
def test_rows_come_back_in_order_without_padding(size):
    batch = rows(size)
    calls, result = through(Dispatch.DP_COMPUTE_PROTO, Group(4), batch)
    assert len({len(call.args[0]) for call in calls}) == 1
    assert result["x"].tolist() == list(range(size))
    assert (len(batch), batch.num_padding, result.num_padding) == (size, 0, 0)


def test_a_padded_batch_of_the_caller_gives_its_rows():
    _, result = through(Dispatch.DP_COMPUTE_PROTO, Group(2), rows(3).pad_to(8))
    assert result["x"].tolist() == [0, 1, 2]


def test_rows_that_became_several_lose_their_padding():
    def twice(call):
        return DataProto.of(x=call.args[0]["x"].repeat_interleave(2))

    _, result = through(Dispatch.DP_COMPUTE_PROTO, Group(2), rows(3), function=twice)
    assert result["x"].tolist() == [0, 0, 1, 1, 2, 2]


def test_without_padding_equal_parts_are_wanted():
    with pytest.raises(DataError, match="3 rows cannot be split into 2 equal parts"):
        through(Dispatch.DP_COMPUTE_PROTO, Group(auto_pad=False), rows(3))
    _, result = through(Dispatch.DP_COMPUTE_PROTO, Group(auto_pad=False), rows(4))
    assert len(result) == 4


def test_wrong_arguments_are_named():
    with pytest.raises(DataError, match="argument 1 is a int, wanted is a DataProto"):
        through(Dispatch.DP_COMPUTE_PROTO, Group(), rows(2), 3)
    with pytest.raises(DataError, match=r"\{'argument 0': 2, 'b': 3\} rows"):
        through(Dispatch.DP_COMPUTE_PROTO, Group(), rows(2), b=rows(3))
    with pytest.raises(DataError, match="no batch to split"):
        through(Dispatch.DP_COMPUTE_PROTO, Group())
    with pytest.raises(DataError, match="returned a int"):
        through(Dispatch.DP_COMPUTE_PROTO, Group(), rows(2), function=lambda call: 1)
    with pytest.raises(DataError, match="return the same number for each row"):
        through(Dispatch.DP_COMPUTE_PROTO, Group(), rows(3), function=lambda call: rows(3))


def test_a_function_goes_to_all():
    calls, result = through(
        Dispatch.DP_COMPUTE_PROTO_WITH_FUNC,
        Group(),
        len,
        rows(3),
        function=lambda call: DataProto.of(n=torch.full((2,), call.args[0](call.args[1]))),
    )
    assert [call.args[0] for call in calls] == [len, len]
    assert result["n"].tolist() == [2, 2, 2]
    with pytest.raises(DataError, match="is no function"):
        through(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, Group(), rows(2))


def test_metrics_are_a_list():
    _, result = through(
        Dispatch.DP_COMPUTE_METRIC, Group(), rows(3), function=lambda call: len(call.args[0])
    )
    assert result == [2, 2]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_mini_batches_have_the_same_rows_on_any_number_of_workers(world_size):
    batch = rows(7, mini_batch_size=3, shuffle_seed=2)
    expected = [sorted(mini["x"].tolist()) for mini in batch.minibatches(3, seed=2)]
    calls, result = through(Dispatch.DP_COMPUTE_MINI_BATCHES, Group(world_size), batch)
    assert result == calls[0].args[0]
    got = [
        sorted(x for part in parts for x in part.unpad()["x"].tolist())
        for parts in zip(*(call.args[0] for call in calls), strict=True)
    ]
    assert got == expected


def test_a_mesh_gives_peers_the_same_rows_and_takes_one_answer():
    places = [MeshPlace(0), MeshPlace(0, False), MeshPlace(1, False), MeshPlace(1)]
    calls, result = through(mesh_mode("tp"), Group(4, places=places), rows(3))
    assert [call.args[0]["x"].tolist() for call in calls] == [[0, 1], [0, 1], [2, 2], [2, 2]]
    assert result["x"].tolist() == [0, 1, 2]


def test_a_mode_can_be_added_by_name():
    last = DispatchMode(
        "last_alone",
        lambda group, args, kwargs: Dispatched(
            [WorkerCall()] * (group.world_size - 1) + [WorkerCall(args)]
        ),
        lambda group, cut, results: results[-1],
    )
    register_dispatch_mode(last)
    try:
        _, result = through("last_alone", Group(3), 5, function=lambda call: call.args)
        assert result == (5,)
        with pytest.raises(ConfigError, match="registered already"):
            register_dispatch_mode(last)
    finally:
        del MODES._targets["last_alone"]


def test_register_only_leaves_a_note():
    class Doubling(Worker):
        @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO, blocking=False)
        def double(self, x):
            return 2 * x

        def helper(self):
            return 1

    assert Doubling().double(4) == 8
    notes = registered_methods(Doubling)
    assert set(notes) == {"double", "mesh_place", "start_profile", "stop_profile"}
    assert (notes["double"].execute, notes["double"].blocking) == (Execute.RANK_ZERO, False)


def test_what_cannot_be_is_refused_when_the_class_is_bound():
    class First(Worker):
        @register(Dispatch.DP_COMPUTE_PROTO, Execute.RANK_ZERO)
        def method(self, batch):
            return batch

    class Unknown(Worker):
        @register("dp_compute_prot")
        def method(self, batch):
            return batch

    with pytest.raises(ConfigError, match=r"First.method.*a part of the rows"):
        registered_methods(First)
    with pytest.raises(UnknownName, match="dp_compute_proto"):
        registered_methods(Unknown)
