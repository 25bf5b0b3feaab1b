"""The receiving end of a broadcast, against a trainer in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from tests.integration.sglang_client import Trainer
from weight_sync.transports.process_group import (
    CollectiveReader,
    GroupAddress,
    TensorSpec,
    WeightGroup,
    join_group,
)

LIMIT_S = 3.0
MIXED = {
    "odd": torch.arange(3, dtype=torch.bfloat16),
    "wide": torch.arange(10, dtype=torch.float32).reshape(2, 5),
    "scalar": torch.tensor(0.25, dtype=torch.float16),
    "empty": torch.empty(0, 4),
    "last": torch.randn(4, 4, generator=torch.Generator().manual_seed(0)),
}
SPECS = [TensorSpec(n, str(t.dtype), tuple(t.shape)) for n, t in MIXED.items()]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    save_file(MIXED, tmp_path / "model.safetensors")
    return tmp_path


Joined = Callable[[], tuple[Trainer, WeightGroup]]


@pytest.fixture
def joined() -> Iterator[Joined]:
    """Pairs of a trainer and our end of its group."""
    trainers: list[Trainer] = []
    groups: list[WeightGroup] = []

    def join() -> tuple[Trainer, WeightGroup]:
        trainer = Trainer("wg")
        trainers.append(trainer)
        body = trainer.group
        address = GroupAddress("wg", "127.0.0.1", body["master_port"], 1, 2, "gloo")
        groups.append(join_group(address, LIMIT_S))
        return trainer, groups[-1]

    yield join
    for trainer in trainers:
        trainer.kill()
    for group in groups:
        group.close()


def same(given: Mapping[str, torch.Tensor]) -> bool:
    return all(
        given[n].dtype == t.dtype and given[n].shape == t.shape and torch.equal(given[n], t)
        for n, t in MIXED.items()
    )


def test_tensors_arrive_as_they_were_sent_one_by_one_and_flattened(
    joined: Joined, mixed: Path
) -> None:
    trainer, group = joined()
    trainer.tell(folder=str(mixed), names=list(MIXED), mode="plain")
    assert same(group.receive(SPECS))
    trainer.tell(folder=str(mixed), names=list(MIXED), mode="flat")
    assert same(group.receive_flattened(SPECS))


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["half", "silent"])
def test_a_trainer_that_dies_or_goes_silent_ends_the_wait(
    joined: Joined, mixed: Path, mode: str
) -> None:
    trainer, group = joined()
    trainer.tell(folder=str(mixed), names=["wide", "last"], mode=mode)
    began = time.monotonic()
    with pytest.raises(SyncError, match="'wg'"):
        group.receive([spec for spec in SPECS if spec.name in ("wide", "last")])
    assert time.monotonic() - began < LIMIT_S + 2
    group.close()
    with pytest.raises(SyncError, match="closed"):
        group.receive(SPECS)
    trainer.kill()
    another, again = joined()  # the name is free
    another.tell(folder=str(mixed), names=list(MIXED), mode="plain")
    assert same(again.receive(SPECS))


def test_a_type_that_versions_cannot_hold_is_refused(joined: Joined) -> None:
    _, group = joined()
    with pytest.raises(SyncError, match="int64"):
        group.receive([TensorSpec("x", "torch.int64", (2,))])


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (2, 2), (3, 2)])
def test_a_rank_that_is_not_ours_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(SyncError, match=f"rank {rank}"):
        join_group(GroupAddress("g", "127.0.0.1", 9, rank, world_size, "gloo"), LIMIT_S)


def test_nobody_at_the_address_is_told_in_time() -> None:
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(join_group, GroupAddress("g", "127.0.0.1", 9, 1, 2, "gloo"), 1.0)
        with pytest.raises(SyncError, match="cannot join group 'g'"):
            asked.result(20)


class Held:
    """A `WeightsSource` of two tensors."""

    held = {"a": torch.zeros(2), "b": torch.ones(3)}

    @property
    def parameters(self) -> Mapping[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.held.items()}

    def read_parameter(self, name: str) -> torch.Tensor:
        return self.held[name].clone()


def test_what_was_not_received_keeps_its_value() -> None:
    reader = CollectiveReader({"a": torch.full((2,), 5.0)}, Held())
    staged = reader.stage(WeightUpdateMeta(4, "received"), Held().parameters)
    assert staged.version == 4
    assert staged.tensors["a"].tolist() == [5.0, 5.0]
    assert staged.tensors["b"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("received", "named"),
    [({"c": torch.zeros(7)}, "extra"), ({"a": torch.zeros(3)}, "shapes")],
)
def test_what_is_of_another_model_is_refused(received: dict[str, torch.Tensor], named: str) -> None:
    with pytest.raises(SyncError, match=f"{named} \\["):
        CollectiveReader(received, Held()).stage(WeightUpdateMeta(4, "x"), Held().parameters)


def test_a_tied_copy_may_come_along() -> None:
    tied = {"a": torch.ones(2), "lm_head": torch.ones(2, dtype=torch.bfloat16)}
    staged = CollectiveReader(tied, Held()).stage(WeightUpdateMeta(4, "x"), Held().parameters)
    assert staged.tensors.keys() == Held.held.keys()
