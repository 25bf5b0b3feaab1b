"""Any mesh of ranks gives the numbers of one process, whatever lies where."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from headway.contracts.errors import ConfigError
from tests.numeric.engines import (
    GRAD_NORM,
    IN_FLOAT64,
    TRAINER,
    assert_close,
    assert_same_figures,
    open_engine,
    parameters_of,
    random_batch,
    token_loss,
    tokens_in_loss,
)
from tests.numeric.float64 import float64_norms
from tests.numeric.models import save_model
from tests.numeric.ranks import run_ranks
from trainer.api import LossOutput, MicroBatchSpec, SaveLoadMeta
from trainer.batching.balance import partition_by_tokens
from trainer.topology import Topology

pytestmark = pytest.mark.extended

KINDS = ("llama", "qwen3")  # qwen3's head is tied to the embeddings
STEPS = 3
SPEC = MicroBatchSpec(25)  # the ranks need different numbers of micro-batches
ALONE = Topology(0, 1, torch.device("cpu"))
MESHES = {
    "2 ranks": (2, None),
    "2 rows of 1": (2, 1),
    "4 ranks": (4, None),
    "2 rows of 2": (4, 2),
    "4 rows of 1": (4, 1),
}


def train(
    topology: Topology, folder: Path, shard_size: int | None, in_float64: bool
) -> dict[str, Any]:
    """Three steps on this rank's share of fixed global batches."""
    with float64_norms(in_float64):
        return train_in(topology, folder, shard_size, in_float64)


def train_in(
    topology: Topology, folder: Path, shard_size: int | None, in_float64: bool
) -> dict[str, Any]:
    trainer = TRAINER.model_copy(update={"shard_size": shard_size})
    engine = open_engine(folder, topology=topology, trainer=trainer, in_float64=in_float64)
    metrics, logprobs = [], []
    for seed in range(STEPS):
        mine = share_of(random_batch(seed), topology)
        stats = engine.train_batch(mine, SPEC, token_loss, tokens_in_loss)
        engine.step_lr_scheduler()
        loss = engine.eval_batch(mine, SPEC, token_loss, tokens_in_loss)
        metrics.append(stats | {"eval": float(loss)})
        logprobs.append(engine.forward(mine, SPEC, post_hook=label_logprobs, aggregate_fn=list))
    parameters = parameters_of(engine)
    return {"metrics": metrics, "parameters": parameters, "logprobs": logprobs}


def share_of(batch, topology: Topology):
    return batch.select(indices_of(batch, topology))


def indices_of(batch, topology: Topology) -> list[int]:
    return partition_by_tokens(batch.lengths, topology.world_size)[topology.rank]


def label_logprobs(output, batch) -> Tensor:
    return output.logprobs(batch["labels"])


def train_kinds(topology: Topology, folders: dict[str, Path], shard_size: int | None):
    return {
        (kind, in_float64): train(topology, folder, shard_size, in_float64)
        for kind, folder in folders.items()
        for in_float64 in (False, True)
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_model(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def one_process(folders):
    return train_kinds(ALONE, folders, None)


@pytest.fixture(scope="module", params=MESHES)
def mesh(request, folders, tmp_path_factory):
    """What each rank of a mesh ended with."""
    world_size, shard_size = MESHES[request.param]
    scratch = tmp_path_factory.mktemp("ranks")
    return run_ranks(world_size, scratch, train_kinds, folders, shard_size)


@pytest.mark.parametrize("kind", KINDS)
def test_every_mesh_trains_as_one_process_does(mesh, one_process, kind):
    """Loss, figures and parameters to 1e-6, and the gradient's norm to `GRAD_NORM`, which says why."""
    expected = one_process[kind, False]
    for rank in mesh:
        got = rank[kind, False]
        for one, all_ranks in zip(expected["metrics"], got["metrics"], strict=True):
            assert_same_figures(all_ranks, one, grad_norm=GRAD_NORM)
            assert one["grad_norm"] > 0.01
        assert_close(got["parameters"], expected["parameters"], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float64_every_mesh_has_the_numbers_of_one_process(mesh, one_process, kind):
    expected = one_process[kind, True]
    for rank in mesh:
        got = rank[kind, True]
        for one, all_ranks in zip(expected["metrics"], got["metrics"], strict=True):
            assert all_ranks == pytest.approx(one, rel=IN_FLOAT64, abs=IN_FLOAT64)
        assert {p.dtype for p in got["parameters"].values()} == {torch.float64}
        assert_close(got["parameters"], expected["parameters"], atol=IN_FLOAT64)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_in_float32_is_as_far_from_float64_as_ranks_are_from_it(one_process, kind):
    """What `GRAD_NORM` is made of: the rounding of one process alone."""
    rounded, exact = one_process[kind, False], one_process[kind, True]
    for got, expected in zip(rounded["metrics"], exact["metrics"], strict=True):
        assert_same_figures(got, expected, grad_norm=GRAD_NORM)
    parameters = {name: p.double() for name, p in rounded["parameters"].items()}
    assert_close(parameters, exact["parameters"], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_computes_logprobs_of_sequences_of_its_own(mesh, one_process, kind):
    for step in range(STEPS):
        seen = []
        for rank, results in enumerate(mesh):
            indices = indices_of(random_batch(step), Topology(rank, len(mesh), ALONE.device))
            seen += indices
            for index, got in zip(indices, results[kind, False]["logprobs"][step], strict=True):
                expected = one_process[kind, False]["logprobs"][step][index]
                torch.testing.assert_close(got, expected, atol=5e-6, rtol=1e-5)
        assert sorted(seen) == list(range(len(random_batch(step).lengths)))


def hybrid_engine(topology: Topology, folder: Path):
    return open_engine(
        folder, topology=topology, trainer=TRAINER.model_copy(update={"shard_size": 2})
    )


class Collectives(TorchDispatchMode):
    """Counts what goes between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # what it does with its shards comes here again
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def watch_collectives(topology: Topology, folder: Path) -> dict[str, Any]:
    """Calls of a step by kind of collective, cut into 1 and into 3 micro-batches, and of a gathering."""
    engine = hybrid_engine(topology, folder)
    batch = random_batch(topology.rank, (10, 10, 10))
    seen = {}
    for name, budget in {"whole": 30, "cut": 10}.items():
        with Collectives() as calls:
            engine.train_batch(batch, MicroBatchSpec(budget), token_loss, tokens_in_loss)
        seen[name] = calls.counts
    with Collectives() as calls:
        num_tensors = len(list(engine._upload.parameters()))
    seen["gathering"] = calls.counts
    placements = {type(p): p.placements for p in engine._model.parameters()}
    return {"calls": seen, "num_tensors": num_tensors, "placements": placements}


@pytest.fixture(scope="module")
def collectives(folders, tmp_path_factory):
    return run_ranks(4, tmp_path_factory.mktemp("calls"), watch_collectives, folders["llama"])


def test_rows_meet_once_per_step_however_many_micro_batches_there_are(collectives):
    for rank in collectives:
        whole, cut = rank["calls"]["whole"], rank["calls"]["cut"]
        assert rank["placements"] == {DTensor: (Replicate(), Shard(0))}
        assert cut["allreduce_"] == whole["allreduce_"] > 0
        assert cut["_reduce_scatter_base_"] == 3 * whole["_reduce_scatter_base_"] > 0


def test_only_the_first_row_gathers_what_goes_out(collectives):
    first, second = collectives[:2], collectives[2:]
    assert all(rank["num_tensors"] and rank["calls"]["gathering"] for rank in first)
    assert not any(rank["num_tensors"] or rank["calls"]["gathering"] for rank in second)


def train_on_one_broken_loss(topology: Topology, folder: Path) -> dict[str, Any]:
    """The last rank's loss is not a number; then a good step."""
    engine = hybrid_engine(topology, folder)
    before = parameters_of(engine)

    def broken(output, batch):
        factor = float("nan") if topology.rank == topology.world_size - 1 else 1.0
        return LossOutput(token_loss(output, batch).loss * factor)

    mine = share_of(random_batch(0), topology)
    metrics = engine.train_batch(mine, SPEC, broken, tokens_in_loss)
    after = parameters_of(engine)
    good = engine.train_batch(mine, SPEC, token_loss, tokens_in_loss)
    return {"before": before, "after": after, "skipped": metrics, "good": good}


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(folders, tmp_path):
    for rank in run_ranks(4, tmp_path, train_on_one_broken_loss, folders["llama"]):
        assert rank["skipped"]["skipped_steps"] == 1.0
        assert rank["good"]["skipped_steps"] == 0.0
        assert_close(rank["after"], rank["before"], atol=0.0)


@pytest.mark.parametrize("shard_size", [3, 8])
def test_ranks_that_make_no_whole_rows_are_refused_before_anything_is_loaded(shard_size, tmp_path):
    trainer = TRAINER.model_copy(update={"shard_size": shard_size})
    with pytest.raises(ConfigError, match=rf"4 ranks .* rows of {shard_size}; set trainer\."):
        open_engine(tmp_path, topology=Topology(0, 4, ALONE.device), trainer=trainer)


def test_nothing_is_offloaded_from_a_cpu(folders):
    trainer = TRAINER.model_copy(update={"cpu_offload": True})
    with pytest.raises(ConfigError, match=r"trainer\.cpu_offload .* trains on the cpu"):
        open_engine(folders["llama"], trainer=trainer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_run_in_the_compute_type_and_parameters_keep_theirs(folders, dtype):
    batch = random_batch(0)
    plain = open_engine(folders["llama"])
    trainer = TRAINER.model_copy(update={"compute_dtype": dtype})
    engine = open_engine(folders["llama"], trainer=trainer)
    seen = []

    def watching(output, batch):
        seen.append(output.hidden.dtype)
        return token_loss(output, batch)

    try:
        expected = plain.train_batch(batch, SPEC, token_loss, tokens_in_loss)
        got = engine.train_batch(batch, SPEC, watching, tokens_in_loss)
        assert set(seen) == {getattr(torch, dtype)}
        is_same = dtype == "float32"
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6 if is_same else 0.05)
        assert got["grad_norm"] == pytest.approx(
            expected["grad_norm"], rel=GRAD_NORM if is_same else 0.1
        )
        parameters = parameters_of(engine)
        assert {p.dtype for p in parameters.values()} == {torch.float32}
        assert_close(parameters, parameters_of(plain), atol=1e-6 if is_same else 2e-3)
    finally:
        engine.destroy()


def train_in_bfloat16(topology: Topology, folder: Path) -> dict[str, Any]:
    """One step with recomputed activations; types of what is kept between passes."""
    trainer = TRAINER.model_copy(update={"compute_dtype": "bfloat16"})
    engine = open_engine(folder, topology=topology, trainer=trainer, gradient_checkpointing=True)
    mine = share_of(random_batch(0), topology)
    metrics = engine.train_batch(mine, SPEC, token_loss, tokens_in_loss)
    kept = {p.dtype for p in engine._model.parameters()}
    kept |= {p.grad.dtype for p in engine._model.parameters()}
    parameters = parameters_of(engine)
    engine.destroy()
    return {"metrics": metrics, "types": kept, "parameters": parameters}


def test_in_bfloat16_ranks_sum_gradients_in_float32(folders, tmp_path):
    expected = train_in_bfloat16(ALONE, folders["qwen3"])
    for rank in run_ranks(2, tmp_path, train_in_bfloat16, folders["qwen3"]):
        assert rank["types"] == {torch.float32}
        # A micro-batch rounds its gradients; which sequences share one differs.
        for name in ("loss", "grad_norm"):
            assert rank["metrics"][name] == pytest.approx(expected["metrics"][name], rel=0.02)
        assert_close(rank["parameters"], expected["parameters"], atol=2e-3)


def save_and_load(topology: Topology, folders: dict[str, Path], scratch: Path) -> dict[str, Any]:
    """Rows save; then all ranks together load that, and what one process saved of another model."""
    engine = hybrid_engine(topology, folders["llama"])
    engine.train_batch(share_of(random_batch(0), topology), SPEC, token_loss, tokens_in_loss)
    engine.save(SaveLoadMeta(str(scratch / "rows")))
    engine.save(SaveLoadMeta(str(scratch / "hf"), weight_format="hf"))
    together = open_engine(folders["llama"], topology=topology)
    together.load(SaveLoadMeta(str(scratch / "rows")))
    loaded = parameters_of(together)
    with pytest.raises(ConfigError, match="does not fit the model"):
        together.load(SaveLoadMeta(str(scratch / "other")))
    kept = parameters_of(together)
    return {"saved": parameters_of(engine), "loaded": loaded, "kept": kept}


def test_what_rows_save_loads_on_any_mesh_and_another_model_on_none(folders, tmp_path):
    open_engine(folders["qwen3"]).save(SaveLoadMeta(str(tmp_path / "other")))
    ranks = run_ranks(4, tmp_path / "ranks", save_and_load, folders, tmp_path)
    alone = open_engine(folders["llama"])
    alone.load(SaveLoadMeta(str(tmp_path / "rows")))
    exported = open_engine(tmp_path / "hf")
    for rank in ranks:
        assert_close(rank["loaded"], rank["saved"], atol=0.0)
        assert_close(rank["kept"], rank["saved"], atol=0.0)
        assert_close(parameters_of(alone), rank["saved"], atol=0.0)
        assert_close(parameters_of(exported), rank["saved"], atol=0.0)
