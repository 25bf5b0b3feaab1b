"""Checkpoints that are copied beside the next passes, as on a GPU: nothing changes before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import StagingOptions

from tests.numeric.engines import (
    assert_close,
    open_engine,
    parameters_of,
    random_batch,
    token_loss,
    tokens_in_loss,
)
from trainer.api import MicroBatchSpec, SaveLoadMeta
from trainer.backends.loading import stand_in
from trainer.backends.state_writer import StateWriter
from trainer.topology import Topology

DEADLINE_S = 60.0
ALONE = Topology(0, 1, torch.device("cpu"))
BEHIND = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=True,
    use_non_blocking_copy=False,
)


class SlowWriter(StateWriter):
    """Copies once it may, and tells who waits for that."""

    def __init__(self) -> None:
        super().__init__(ALONE, BEHIND)
        self.may_copy, self.is_awaited = threading.Event(), threading.Event()
        copy = self._stager._stage
        self._stager._stage = lambda *args: (self.may_copy.wait(DEADLINE_S), copy(*args))[1]

    def finish_snapshot(self) -> None:
        if self._snapshot is not None:
            self.is_awaited.set()
        super().finish_snapshot()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def train(engine: Any, seed: int) -> None:
    engine.train_batch(random_batch(seed), MicroBatchSpec(40), token_loss, tokens_in_loss)


def test_passes_run_while_a_state_is_copied_and_its_step_waits(llama_dir, tmp_path, pool):
    engine = open_engine(llama_dir)
    train(engine, 0)
    saved = parameters_of(engine)
    writer = engine._writer = SlowWriter()
    written = engine.save(SaveLoadMeta(str(tmp_path), asynchronous=True))
    step = pool.submit(train, engine, 1)
    assert writer.is_awaited.wait(DEADLINE_S)
    assert all(p.grad is not None for p in engine._model.parameters())  # the passes are over
    assert_close(parameters_of(engine), saved, atol=0.0)
    assert not step.done() and not written.done()
    writer.may_copy.set()
    step.result(DEADLINE_S)
    written.result(DEADLINE_S)
    other = open_engine(llama_dir)
    other.load(SaveLoadMeta(str(tmp_path)))
    assert_close(parameters_of(other), saved, atol=0.0)
    with pytest.raises(AssertionError):
        assert_close(parameters_of(engine), saved, atol=0.0)


@pytest.mark.parametrize("change", ["load", "move_towards"])
def test_nothing_else_changes_what_is_copied(llama_dir, tmp_path, pool, change):
    engine, other = open_engine(llama_dir), open_engine(llama_dir)
    train(other, 3)
    other.save(SaveLoadMeta(str(tmp_path / "other")))
    saved = parameters_of(engine)
    writer = engine._writer = SlowWriter()
    written = engine.save(SaveLoadMeta(str(tmp_path / "one"), asynchronous=True))
    if change == "load":
        changed = pool.submit(engine.load, SaveLoadMeta(str(tmp_path / "other")))
    else:
        changed = pool.submit(engine.move_towards, other, 0.5)
    assert writer.is_awaited.wait(DEADLINE_S)
    assert_close(parameters_of(engine), saved, atol=0.0)
    writer.may_copy.set()
    changed.result(DEADLINE_S)
    written.result(DEADLINE_S)
    other.load(SaveLoadMeta(str(tmp_path / "one")))
    assert_close(parameters_of(other), saved, atol=0.0)


def test_a_copy_that_fails_is_told_by_the_future_alone(llama_dir, tmp_path):
    engine = open_engine(llama_dir)
    writer = engine._writer = StateWriter(ALONE, BEHIND)

    def broken(*args: Any) -> Any:
        raise RuntimeError("no memory to copy into")

    writer._stager._stage = broken
    written = engine.save(SaveLoadMeta(str(tmp_path), asynchronous=True))
    train(engine, 0)
    with pytest.raises(Exception, match="no memory to copy into"):
        written.result(DEADLINE_S)


def test_a_rank_without_values_gives_memory_where_the_parts_go():
    """On the host it would be copied to the device, all of the model."""
    mesh = SimpleNamespace(device_type="meta")
    whole = stand_in(SimpleNamespace(shape=(3, 2), dtype=torch.bfloat16, device_mesh=mesh))
    assert (whole.device.type, whole.shape, whole.dtype) == ("meta", (3, 2), torch.bfloat16)
