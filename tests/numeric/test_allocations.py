"""Calls on some ranks: the numbers are those of one process; calls without a common rank overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.errors import ConfigError
from tests.numeric.engines import assert_close, assert_same_figures, parameters_of
from tests.numeric.policies import experiment, open_models, train
from tests.numeric.ranks import run_ranks
from trainer.allocations import Allocations
from trainer.api import MicroBatchSpec
from trainer.checkpoint import Checkpoints, RunState
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.policy import policy_calls
from trainer.dataflow.trace import TRACE_NAME
from trainer.topology import Topology

STEPS = 2
LOOSE = {"grad_norm": 1e-5, "explained_variance": 2e-6, "kl": 2e-6, "ratio": 2e-6}
SPLIT: dict[str, Any] = {
    "actor_inf": {"ranks": [0]},
    "actor_train": {"ranks": [0], "mb_spec": {"n_mbs": 2}},
    "ref_inf": {"ranks": [1], "mb_spec": {"max_tokens_per_mb": 100}},
    "critic_inf": {"ranks": [1]},
    "critic_train": {"ranks": [1], "mb_spec": {"n_mbs": 3}},
}
THREE: dict[str, Any] = {
    "actor_inf": {"ranks": [0, 2]},
    "actor_train": {"ranks": [0, 2]},
    "ref_inf": {"ranks": [1, 2]},
    "critic_inf": {"ranks": [1]},
    "critic_train": {"ranks": [1]},
}


def config_of(folder: Path, run_dir: Path, allocations: dict[str, Any], trace_steps: int = 0):
    return experiment(
        folder,
        run_dir=str(run_dir),
        algorithm={
            "kl_in": "reward",
            "kl_coef": 0.2,
            "kl_estimator": "k2",
            "advantage": {"type": "gae", "gae_lambda": 0.9},
            "num_minibatches": 2,
        },
        critic={"normalization": "exponential", "decay": 0.9},
        dataflow={"trace_steps": trace_steps, "allocations": allocations},
    )


def parameters(models: Any) -> dict[str, torch.Tensor]:
    """Of the models that this rank holds."""
    found = {}
    for name, engine, _ in models.checkpoint_contents.folders:
        if hasattr(engine, "train_engine"):
            found |= {f"{name}.{key}": t for key, t in parameters_of(engine).items()}
    return found


def run_rank(
    topology: Topology,
    folder: Path,
    run_dir: Path,
    allocations: dict[str, Any],
    behind: bool,
    trace_steps: int = 0,
):
    """Figures of two steps, then of one after a checkpoint was saved and loaded by new models."""
    config = config_of(folder, run_dir, allocations, trace_steps)
    models = open_models(config, topology)
    metrics = train(models, range(STEPS))
    checkpoints = Checkpoints(run_dir, RecoveryConfig(asynchronous=behind), topology)
    checkpoints.save(models.checkpoint_contents, RunState("run", step=STEPS))
    checkpoints.finish()
    models.export(run_dir)
    metrics += train(models, range(STEPS, STEPS + 1))
    held = parameters(models)
    numbers = {n: part.state_dict() for n, part in models.checkpoint_contents.states.items()}
    again = open_models(config_of(folder, run_dir, allocations), topology)
    Checkpoints(run_dir, RecoveryConfig(), topology).load_newest(again.checkpoint_contents)
    resumed = train(again, range(STEPS, STEPS + 1))
    same = all(torch.equal(held[name], t) for name, t in parameters(again).items())
    again.destroy()
    return metrics, held, numbers, resumed, same


@pytest.mark.extended
@pytest.mark.parametrize(
    ("world_size", "allocations", "behind"), [(2, SPLIT, True), (3, THREE, False)]
)
def test_calls_on_some_ranks_have_the_numbers_of_one_process(
    tmp_path, llama_dir, world_size, allocations, behind
):
    alone = open_models(config_of(llama_dir, tmp_path / "alone", {}))
    wanted = train(alone, range(STEPS + 1))
    numbers = {n: part.state_dict() for n, part in alone.checkpoint_contents.states.items()}
    held = {}
    run_dir = tmp_path / "split"
    for got, mine, learned, resumed, same in run_ranks(
        world_size, tmp_path / "ranks", run_rank, llama_dir, run_dir, allocations, behind, 2
    ):
        for step, figures in enumerate(got):
            assert_same_figures(figures, wanted[step], **LOOSE)
        assert learned.keys() == numbers.keys()
        for name, wanted_numbers in numbers.items():
            assert learned[name] == pytest.approx(wanted_numbers, rel=1e-5)
        assert_same_figures(resumed[0], got[STEPS])
        assert same, "a resumed rank goes on bit for bit"
        held |= mine
    assert_close(held, parameters(alone), atol=2e-5)
    for name in ("model", "critic"):
        assert (run_dir / name / "config.json").is_file()
    events = json.loads((run_dir / TRACE_NAME).read_text())["traceEvents"]
    assert {event["name"] for event in events} >= set(allocations)


def flow_of(folder: Path, allocations: dict[str, Any], world_size: int, is_serial: bool = False):
    config = config_of(folder, folder, allocations)
    calls = policy_calls(config)
    found = Allocations(config, calls, world_size)
    return Dataflow(calls, found.ranks_of_calls(), is_serial), found


def test_updates_without_a_common_rank_do_not_wait_for_one_another(tmp_path):
    split, found = flow_of(tmp_path, SPLIT, 2)
    assert found.are_split
    assert "critic_train" not in split.waits["actor_train"]
    whole, same = flow_of(tmp_path, {"critic_train": {"mb_spec": {"n_mbs": 2}}}, 2)
    assert not same.are_split
    assert "critic_train" in whole.waits["actor_train"]


def test_on_gpus_calls_with_a_common_rank_run_one_after_another(tmp_path):
    flow, _ = flow_of(tmp_path, SPLIT, 2, is_serial=True)
    order = [call.name for call in flow.calls]
    on_one = sorted(("ref_inf", "critic_inf"), key=order.index)
    assert on_one[0] in flow.waits[on_one[1]]
    assert not {"ref_inf", "critic_inf"} & flow.waits["actor_inf"]
    plain, _ = flow_of(tmp_path, SPLIT, 2)
    assert on_one[0] not in plain.waits[on_one[1]]


def test_every_call_has_its_own_micro_batches(tmp_path):
    flow, found = flow_of(tmp_path, SPLIT, 2)
    by_name = {call.name: call for call in flow.calls}
    assert found.mb_spec_of(by_name["critic_train"]) == MicroBatchSpec(40, 3)
    assert found.mb_spec_of(by_name["ref_inf"]) == MicroBatchSpec(100, 1)
    assert found.mb_spec_of(by_name["critic_inf"]) == MicroBatchSpec(40, 1)


@pytest.mark.parametrize(
    ("allocations", "reason"),
    [
        ({"critc_inf": {}}, "did you mean 'critic_inf'"),
        ({"critic_inf": {"ranks": [1]}}, "critic_inf runs on ranks.*critic_train on"),
        ({"ref_inf": {"ranks": [2]}}, "the trainer has 2 ranks"),
        ({"actor_gen": {"ranks": [0]}}, "set num_servers"),
        ({"advantages": {"ranks": [0]}}, "asks no model"),
        ({"actor_inf": {"ranks": [1]}, "actor_train": {"ranks": [1]}}, "name 0 as well"),
    ],
    ids=str,
)
def test_allocations_that_cannot_be_are_refused_by_name(tmp_path, allocations, reason):
    with pytest.raises(ConfigError, match=reason):
        flow_of(tmp_path, allocations, 2)


@pytest.mark.parametrize("ranks", [[1, 0], [0, 0], [-1], []])
def test_ranks_are_named_once_and_in_order(tmp_path, ranks):
    with pytest.raises(ValueError, match="ranks"):
        config_of(tmp_path, tmp_path, {"ref_inf": {"ranks": ranks}})


def counted(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of micro-batches of every call of the model."""
    seen: list[int] = []
    passes = engine.train_engine._passes
    split = passes.micro_batches

    def count(batch: Any, bins: list[list[int]]) -> Any:
        seen.append(len(bins))
        return split(batch, bins)

    monkeypatch.setattr(passes, "micro_batches", count)
    return seen


def test_a_call_splits_its_batch_into_so_many_micro_batches(llama_dir, tmp_path, monkeypatch):
    allocations = {
        "critic_inf": {"mb_spec": {"n_mbs": 12, "max_tokens_per_mb": 1000}},
        "critic_train": {"mb_spec": {"n_mbs": 5, "max_tokens_per_mb": 1000}},
    }
    models = open_models(config_of(llama_dir, tmp_path, allocations))
    seen = counted(models.checkpoint_contents.models["critic"], monkeypatch)
    got = train(models, range(1))
    assert seen == [12, 5, 5]  # two mini-batches
    wanted = train(open_models(config_of(llama_dir, tmp_path, {})), range(1))
    assert_same_figures(got[0], wanted[0], **LOOSE)
