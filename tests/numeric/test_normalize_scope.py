"""`token_normalize_scope` on two ranks with different numbers of tokens, against one process that gives
each token its weight itself, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numeric.engines import IN_FLOAT64, assert_close, open_engine, parameters_of, random_batch
from tests.numeric.float64 import float64_norms
from tests.numeric.ranks import run_ranks
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput
from trainer.batching.sequences import SequenceBatch
from trainer.topology import Topology

ALONE = Topology(0, 1, torch.device("cpu"))
SPEC = MicroBatchSpec(25)
SHARES = ((0, 1, 2, 3, 4), (5, 6))  # 46 and 10 tokens
FIGURES = ("loss", "grad_norm", "mean")


def loss(output: ModelOutput, batch: SequenceBatch) -> LossOutput:
    shares = batch["shares"] * batch["loss_mask"]
    nll = -output.logprobs(batch["labels"]).double()
    mean = (nll * shares).sum() / shares.sum()
    return LossOutput(mean, {"mean": mean.detach()})


def weight(batch: SequenceBatch) -> float:
    return float((batch["shares"] * batch["loss_mask"]).sum())


def batch_with(shares: torch.Tensor | None = None) -> SequenceBatch:
    batch = random_batch(0)
    ones = torch.ones(batch.num_tokens, dtype=torch.float64)
    return batch.with_columns(shares=ones if shares is None else shares)


def step(topology: Topology, folder: Path, batch: SequenceBatch, *scope: Any) -> dict[str, Any]:
    with float64_norms():
        engine = open_engine(folder, topology=topology, in_float64=True)
        evaluated = engine.eval_batch(batch, SPEC, loss, weight, *scope)
        figures = engine.train_batch(batch, SPEC, loss, weight, *scope)
    return figures | {"eval": float(evaluated), "parameters": parameters_of(engine)}


def steps_on_rank(topology: Topology, folder: Path) -> dict[str, dict[str, Any]]:
    mine = batch_with().select(SHARES[topology.rank])
    steps = {scope: step(topology, folder, mine, scope) for scope in ("global", "dp")}
    return steps | {"one without": step_beside_nothing(topology, folder)}


def step_beside_nothing(topology: Topology, folder: Path) -> dict[str, Any]:
    batch = batch_with().select(SHARES[topology.rank])
    if topology.rank == 1:
        batch = batch.with_columns(shares=torch.zeros(batch.num_tokens, dtype=torch.float64))

    def safe(output: ModelOutput, part: SequenceBatch) -> LossOutput:
        if weight(part) == 0.0:
            nothing = output.logprobs(part["labels"]).sum() * 0.0
            return LossOutput(nothing, {"mean": torch.zeros(())})
        return loss(output, part)

    with float64_norms():
        engine = open_engine(folder, topology=topology, in_float64=True)
        return engine.train_batch(batch, SPEC, safe, weight, "dp")


@pytest.fixture(scope="module")
def on_two_ranks(llama_dir, tmp_path_factory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, tmp_path_factory.mktemp("ranks"), steps_on_rank, llama_dir)


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_close(got["parameters"], expected["parameters"], atol=IN_FLOAT64)
    for name in (*FIGURES, "eval"):
        assert got[name] == pytest.approx(expected[name], rel=IN_FLOAT64), name


def test_dp_gives_every_rank_the_same_weight_and_global_every_token(llama_dir, on_two_ranks):
    expected = {"global": step(ALONE, llama_dir, batch_with())}
    whole = batch_with()
    counts = [int(whole.select(share)["loss_mask"].sum()) for share in SHARES]
    assert counts[0] > 2 * counts[1] > 0
    sizes = [whole.lengths[i] for share in SHARES for i in share]
    of_rank = [1.0 / counts[rank] for rank, share in enumerate(SHARES) for _ in share]
    shares = torch.tensor(of_rank, dtype=torch.float64).repeat_interleave(torch.tensor(sizes))
    expected["dp"] = step(ALONE, llama_dir, batch_with(shares))
    assert abs(expected["dp"]["loss"] - expected["global"]["loss"]) > 1e-3
    for steps in on_two_ranks:
        for scope, wanted in expected.items():
            assert_same(steps[scope], wanted)


def test_one_rank_is_all_ranks(llama_dir):
    assert_same(
        step(ALONE, llama_dir, batch_with(), "dp"), step(ALONE, llama_dir, batch_with(), "global")
    )


def test_a_rank_without_a_token_in_the_loss_adds_nothing(llama_dir, on_two_ranks):
    alone = step(ALONE, llama_dir, batch_with().select(SHARES[0]))
    for steps in on_two_ranks:
        got = steps["one without"]
        assert got["loss"] == pytest.approx(alone["loss"] / 2, rel=IN_FLOAT64)
        assert got["grad_norm"] == pytest.approx(alone["grad_norm"] / 2, rel=IN_FLOAT64)
