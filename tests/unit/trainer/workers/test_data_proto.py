from __future__ import annotations

import pickle

import pytest
import torch

from headway.contracts.errors import DataError
from tests.numeric.worker_rows import content_of
from trainer.workers.data_proto import DataProto


def rows(size: int, start: int = 0, **meta: object) -> DataProto:
    x = torch.arange(start, start + size)
    return DataProto.of(meta, x=x, y=torch.stack([x, -x], 1), name=[f"n{i}" for i in x.tolist()])


def x_of(batch: DataProto) -> list[int]:
    assert batch["y"][:, 0].tolist() == batch["x"].tolist()
    assert batch["name"].tolist() == [f"n{i}" for i in batch["x"].tolist()]
    return batch["x"].tolist()


def test_columns_of_other_lengths_are_refused():
    with pytest.raises(DataError, match="one number for all"):
        DataProto.of(x=torch.arange(3), name=["a", "b"])


def test_a_missing_column_is_named():
    with pytest.raises(DataError, match=r"no column 'z'.*'name', 'x', 'y'"):
        rows(2)["z"]


def test_objects_may_be_sequences_themselves():
    batch = DataProto.of(x=torch.arange(2), turns=[["a", "b"], ["c"]])
    assert batch.rows([1])["turns"].tolist() == [["c"]]


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.pad_to(4),
        lambda b: b.with_columns(x=torch.zeros(3)),
        lambda b: b.with_meta(note=2),
        lambda b: b.select(["x"]),
        lambda b: b.repeat(2),
        lambda b: b.union(DataProto.of(z=torch.zeros(3))),
        lambda b: b.rows([2, 0, 1]),
    ],
)
def test_nothing_changes_the_batch_itself(change):
    batch = rows(3, note=1)
    before = content_of(batch)
    change(batch)
    assert content_of(batch) == before


def test_select():
    taken = rows(2, note=1).select(["x", "name"])
    assert taken.columns == {"x", "name"}
    assert taken.meta == {"note": 1}
    assert rows(2, note=1, other=2).select(["x"], ["other"]).meta == {"other": 2}


def test_union_takes_what_is_equal_and_refuses_what_is_not():
    one, other = rows(2), rows(2).with_columns(z=torch.zeros(2))
    assert one.union(other).columns == {"x", "y", "z", "name"}
    with pytest.raises(DataError, match="column 'x' differs"):
        one.union(DataProto.of(x=torch.tensor([0, 2])))
    with pytest.raises(DataError, match="column 'x' differs"):
        one.union(DataProto.of(x=torch.tensor([0.0, 1.0])))
    with pytest.raises(DataError, match=r"meta\['a'\] differs"):
        rows(2, a=1).union(rows(2, a=2))
    with pytest.raises(DataError, match="no union with 3"):
        one.union(DataProto.of(z=torch.zeros(3)))


def test_a_nan_is_equal_to_itself():
    batch = DataProto.of(x=torch.tensor([torch.nan]))
    assert batch.union(batch)["x"].isnan().all()


def test_chunk_split_and_concat():
    assert [x_of(part) for part in rows(6).chunk(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [x_of(part) for part in rows(5).split(2)] == [[0, 1], [2, 3], [4]]
    assert x_of(DataProto.concat(rows(5).split(2))) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="5 rows cannot be split into 3 equal parts"):
        rows(5).chunk(3)
    with pytest.raises(DataError, match="cannot follow"):
        DataProto.concat([rows(1), rows(1).select(["x"])])


def test_concat_gathers_metrics_and_refuses_other_notes():
    parts = [DataProto.of({"metrics": {"loss": n, "each": [n]}, "t": 1}) for n in (1, 2)]
    assert DataProto.concat(parts).meta == {"t": 1, "metrics": {"loss": [1, 2], "each": [1, 2]}}
    with pytest.raises(DataError, match=r"meta\['t'\] differs"):
        DataProto.concat([rows(1, t=1), rows(1, t=2)])


def test_repeat_and_rows():
    assert x_of(rows(2).repeat(3)) == [0, 0, 0, 1, 1, 1]
    assert x_of(rows(2).repeat(3, interleave=False)) == [0, 1, 0, 1, 0, 1]
    assert x_of(rows(3).rows([2, 0, 1])) == [2, 0, 1]
    with pytest.raises(DataError, match="no row 3 among 3"):
        rows(3).rows([0, 3])


@pytest.mark.parametrize(
    ("size", "multiple", "padding"), [(5, 4, 3), (1, 4, 3), (4, 4, 0), (3, 1, 0)]
)
def test_padding_is_copies_of_the_last_row(size, multiple, padding):
    padded = rows(size).pad_to(multiple)
    assert padded.num_padding == padding
    assert x_of(padded) == [*range(size), *[size - 1] * padding]
    assert x_of(padded.unpad()) == [*range(size)]
    assert padded.unpad().num_padding == 0


def test_parts_know_their_padding():
    parts = rows(5).pad_to(4).chunk(4)
    assert [part.num_padding for part in parts] == [0, 0, 1, 2]
    assert x_of(DataProto.concat(parts).unpad()) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="padding rows stand before others"):
        DataProto.concat(parts[::-1])
    with pytest.raises(DataError, match="unpad first"):
        parts[2].repeat(2)
    with pytest.raises(DataError, match="none to pad with"):
        DataProto().pad_to(2)


def test_minibatches_hold_each_row_once_per_epoch():
    minis = list(rows(7).minibatches(3, epochs=2, seed=1))
    assert [len(mini) for mini in minis] == [3, 3, 1, 3, 3, 1]
    epochs = [[x for mini in half for x in x_of(mini)] for half in (minis[:3], minis[3:])]
    assert [sorted(epoch) for epoch in epochs] == [[*range(7)]] * 2
    assert epochs[0] != epochs[1]
    assert [x_of(m) for m in rows(7).minibatches(3, seed=1)] == [x_of(m) for m in minis[:3]]
    assert [x_of(mini) for mini in rows(4).minibatches(3)] == [[0, 1, 2], [3]]


def test_a_part_is_pickled_without_the_rest():
    whole = DataProto.of(x=torch.zeros(1 << 16, dtype=torch.uint8))
    part = whole.chunk(64)[3]
    sent = pickle.dumps(part)
    assert len(sent) < 2 * len(part) + 1000
    assert content_of(pickle.loads(sent)) == content_of(part)
