"""Policy experiments with all their models: 1, 2 and 4 ranks give the same numbers, and a resumed run
goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.errors import ConfigError
from tests.numeric.engines import IN_FLOAT64, assert_close, assert_same_figures, parameters_of
from tests.numeric.float64 import float64_norms
from tests.numeric.models import save_model
from tests.numeric.policies import ALONE, experiment, open_models, train
from tests.numeric.ranks import run_ranks
from trainer.checkpoint import Checkpoints, RunState
from trainer.topology import Topology

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # read by peft 0.21
)
STEPS = 3
LOOSE = {
    "grad_norm": 4e-5,
    "explained_variance": 2e-6,
    "kl": 2e-6,
    "behaviour_weight": 2e-6,
    "ratio": 2e-6,
}
"""Bounds in float32, where they are above 1e-6. All models learn, and second mini-batches start from
weights that have moved. Rounding depends on the processor. One process alone (`grpo`, second step) has a
gradient norm 3.5e-6 or 5.3e-6 off that of float64, depending on its micro-batches. Four ranks were 6.6e-6
off one process with AVX-512, and 1.4e-5 with AVX2. In float64 ranks are held to 1e-11 below."""
FULL: dict[str, Any] = {
    "algorithm": {
        "kl_in": "reward",
        "kl_coef": 0.2,
        "kl_estimator": "k2",
        "kl_target": 0.05,
        "kl_horizon": 100,
        "advantage": {"gae_lambda": 0.9},
        "m2_threshold": 2.0,
        "num_minibatches": 2,
        "distillation_coef": 0.3,
    },
    "critic": {"normalization": "exponential", "decay": 0.9, "huber_delta": 2.0},
    "reference": {"ema_eta": 0.2},
}
KINDS = {
    "ppo": FULL,
    "grpo": {
        "algorithm": {
            "m2_threshold": 2.0,
            "num_minibatches": 2,
            "kl_coef": 0.1,
            "advantage_norm": "batch",
        }
    },
    # Policy and critic are adapters, and the reference is the model below the first.
    "lora": {
        "algorithm": {"kl_coef": 0.1, "kl_estimator": "k2"},
        "model": {"lora": {"rank": 4, "target_modules": ["q_proj", "down_proj"]}},
    },
}


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher"), "llama", seed=1)


def config_of(kind: str, folder: Path, teacher: Path, in_float64: bool = False):
    sections = KINDS[kind] | {"model": {"path": str(folder), **KINDS[kind].get("model", {})}}
    if "distillation_coef" in sections["algorithm"]:
        sections["teacher"] = {"path": str(teacher)}
    config = experiment(folder, "grpo" if kind == "grpo" else "ppo", **sections)
    if not in_float64:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float64"})})


def all_parameters(models) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": tensor
        for name, engine, _ in models.checkpoint_contents.folders
        for key, tensor in parameters_of(engine).items()
    }


def run_rank(
    topology: Topology,
    kind: str,
    folder: Path,
    teacher: Path,
    saved: Path,
    in_float64: bool = False,
):
    """Figures, parameters and numbers after some steps; then saved, and everything is left."""
    with float64_norms(in_float64):
        models = open_models(config_of(kind, folder, teacher, in_float64), topology)
        metrics = train(models, range(STEPS))
    parameters = all_parameters(models)
    numbers = {name: part.state_dict() for name, part in models.checkpoint_contents.states.items()}
    checkpoints = Checkpoints(saved, RecoveryConfig(), topology)
    checkpoints.save(models.checkpoint_contents, RunState("run", step=STEPS))
    checkpoints.finish()
    models.destroy()  # several engines, one process group
    assert not dist.is_initialized()
    return metrics, parameters, numbers


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_of_any_number_has_the_numbers_of_one(
    llama_dir, teacher_dir, tmp_path, kind, world_size
):
    folders = (kind, llama_dir, teacher_dir)
    one = run_rank(ALONE, *folders, tmp_path / "one")
    expected, parameters, numbers = one
    ranks = run_ranks(world_size, tmp_path / "ranks", run_rank, *folders, tmp_path / "many")
    for metrics, got, learned in ranks:
        for alone, together in zip(expected, metrics, strict=True):
            assert_same_figures(together, alone, **LOOSE)
        assert_close(got, parameters, atol=1e-6, mean=1e-8)
        assert learned.keys() == numbers.keys()
        for name, values in learned.items():
            assert values == pytest.approx(numbers[name], rel=1e-6)
    # What they saved together loads into one process.
    resumed = open_models(config_of(*folders))
    checkpoints = Checkpoints(tmp_path / "many", RecoveryConfig(), ALONE)
    assert checkpoints.load_newest(resumed.checkpoint_contents) == RunState("run", step=STEPS)
    assert_close(all_parameters(resumed), ranks[0][1], atol=0.0)


@pytest.mark.extended
def test_in_float64_every_rank_has_the_numbers_of_one(llama_dir, teacher_dir, tmp_path):
    folders = ("grpo", llama_dir, teacher_dir)
    expected, parameters, _ = run_rank(ALONE, *folders, tmp_path / "one", True)
    ranks = run_ranks(4, tmp_path / "ranks", run_rank, *folders, tmp_path / "many", True)
    for metrics, got, _ in ranks:
        for alone, together in zip(expected, metrics, strict=True):
            assert together == pytest.approx(alone, rel=IN_FLOAT64, abs=IN_FLOAT64)
        assert_close(got, parameters, atol=IN_FLOAT64)


def test_a_resumed_run_of_all_models_equals_an_uninterrupted_one_bit_for_bit(
    llama_dir, teacher_dir, tmp_path
):
    config = config_of("ppo", llama_dir, teacher_dir)
    uninterrupted = open_models(config)
    expected = train(uninterrupted, range(4))

    first = open_models(config)
    train(first, range(2))
    checkpoints = Checkpoints(tmp_path, RecoveryConfig(), ALONE)
    checkpoints.save(first.checkpoint_contents, RunState("run", step=2))
    resumed = open_models(config)
    assert checkpoints.load_newest(resumed.checkpoint_contents) == RunState("run", step=2)
    for models in (first, resumed):  # saving did not disturb the run that saved
        assert train(models, range(2, 4)) == expected[2:]
        assert_close(all_parameters(models), all_parameters(uninterrupted), atol=0.0)


@pytest.mark.parametrize(("stored", "wanted"), [("grpo", "ppo"), ("ppo", "grpo")])
def test_a_checkpoint_of_an_experiment_with_other_models_is_refused_and_changes_nothing(
    llama_dir, teacher_dir, tmp_path, stored, wanted
):
    other = open_models(config_of(stored, llama_dir, teacher_dir))
    train(other, range(1))
    checkpoints = Checkpoints(tmp_path, RecoveryConfig(), ALONE)
    checkpoints.save(other.checkpoint_contents, RunState("run", step=1))
    models = open_models(config_of(wanted, llama_dir, teacher_dir))
    before = all_parameters(models)
    with pytest.raises(ConfigError, match="does not fit the experiment: it holds"):
        checkpoints.load_newest(models.checkpoint_contents)
    assert_close(all_parameters(models), before, atol=0.0)
