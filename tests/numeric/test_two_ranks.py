"""FSDP2 on two gloo ranks gives the numbers of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file

from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.types import WeightUpdateMeta
from tests.numeric import rank_program
from tests.numeric.engines import (
    GRAD_NORM,
    assert_close,
    assert_same_figures,
    open_engine,
    parameters_of,
)
from tests.numeric.models import save_model
from trainer.api import SaveLoadMeta
from weight_sync.channel import StagedWeights
from weight_sync.deadline import Deadline
from weight_sync.receiver import make_receiver
from weight_sync.store import version_name

ROOT = Path(__file__).parents[2]
DEADLINE_S = 100


class Runs(NamedTuple):
    model_dir: Path
    one_process: Path
    two_ranks: Path


pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def two_ranks_root(tmp_path_factory):
    """Model directories by name, and below `out` what two ranks made of them."""
    root = tmp_path_factory.mktemp("two-ranks")
    models = [save_model(root / name, name) for name in ("llama", "qwen3")]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", rank_program.__name__, str(root / "out"), *map(str, models)]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, *program],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return root


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def runs(request, two_ranks_root, tmp_path_factory):
    """Model directory, and the outputs of one process and of two ranks."""
    model_dir = two_ranks_root / request.param
    one_process = tmp_path_factory.mktemp("one-process")
    rank_program.run(model_dir, one_process)
    return Runs(model_dir, one_process, two_ranks_root / "out" / request.param)


def staged(out: Path, model_dir: Path) -> StagedWeights:
    root = out / "weights"
    shapes = {name: p.shape for name, p in parameters_of(open_engine(model_dir)).items()}
    meta = WeightUpdateMeta(rank_program.VERSION, str(root / version_name(rank_program.VERSION)))
    receiver = make_receiver(ReceiverConfig(allow=(str(root),)))
    return receiver.within(Deadline(DEADLINE_S)).stage(meta, shapes)


def test_loss_gradient_norm_and_figures_are_those_of_one_process(runs):
    one = json.loads((runs.one_process / "figures.json").read_text())
    two = json.loads((runs.two_ranks / "figures.json").read_text())
    assert len(one) == rank_program.STEPS
    for expected, got in zip(one, two, strict=True):
        assert_same_figures(got, expected, grad_norm=GRAD_NORM)
        assert got["grad_norm"] > 0.01


def test_published_tensors_are_those_of_one_process(runs):
    one, two = staged(runs.one_process, runs.model_dir), staged(runs.two_ranks, runs.model_dir)
    assert_close(dict(two.tensors), dict(one.tensors), atol=1e-6)
    untrained = parameters_of(open_engine(runs.model_dir))
    assert any((one.tensors[n] - p).abs().max() > 1e-4 for n, p in untrained.items())


def test_the_exported_directory_holds_what_was_published(runs):
    exported = load_file(runs.two_ranks / "hf" / "model.safetensors")
    assert_close(exported, dict(staged(runs.two_ranks, runs.model_dir).tensors), atol=0.0)


def test_a_checkpoint_of_two_ranks_loads_into_one_process(runs):
    engine = open_engine(runs.model_dir)
    engine.load(SaveLoadMeta(str(runs.two_ranks / "checkpoint")))
    published = dict(staged(runs.two_ranks, runs.model_dir).tensors)
    assert_close(parameters_of(engine), published, atol=0.0)
    states = engine._optimizer.state.values()
    assert {float(state["step"]) for state in states} == {float(rank_program.STEPS)}
    assert all(state["exp_avg"].any() for state in states)
