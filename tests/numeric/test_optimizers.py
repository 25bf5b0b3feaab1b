"""Optimizers and their settings: none at all, a warm-up as a share, losses that are scaled in float16."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from headway.contracts.config.experiment import SFTExperiment
from headway.contracts.config.optimizer import EMPTY, OptimizerConfig
from headway.contracts.errors import ConfigError
from tests.numeric.engines import (
    OPTIMIZER,
    TRAINER,
    assert_close,
    bare,
    open_engine,
    parameters_of,
    random_batch,
    token_loss,
    tokens_in_loss,
)
from trainer.api import MicroBatchSpec, SaveLoadMeta
from trainer.backends.loss_scale import LossScale
from trainer.backends.schedule import lr_factor

HALF = TRAINER.model_copy(update={"compute_dtype": "float16"})
SPEC = MicroBatchSpec(40)


def step(engine, seed: int = 0) -> dict[str, float]:
    return engine.train_batch(random_batch(seed), SPEC, token_loss, tokens_in_loss)


def scaled(**options) -> OptimizerConfig:
    return OPTIMIZER.model_copy(update=options)


def test_an_empty_optimizer_holds_nothing_and_trains_nothing(llama_dir, tmp_path):
    engine = open_engine(llama_dir, optimizer=EMPTY)
    with pytest.raises(ConfigError, match="type=empty trains nothing"):
        step(engine)
    assert not bare(engine)._optimizer.state
    assert torch.isfinite(engine.forward(random_batch(0), SPEC)).all()  # it is asked all the same
    engine.save(SaveLoadMeta(str(tmp_path / "saved"), with_optim=False))
    engine.load(SaveLoadMeta(str(tmp_path / "saved"), with_optim=False))


def test_an_experiment_wants_an_optimizer():
    tree = {"model": {"path": "m"}, "data": {"path": "d"}, "output_dir": "o"}
    with pytest.raises(ValidationError, match=r"optimizer\.type=adam"):
        SFTExperiment.model_validate(tree | {"optimizer": {"type": "empty"}})


@pytest.mark.parametrize(
    ("share", "total", "steps"), [(0.001, 999, 0), (0.02, 100, 2), (0.5, 9, 4)]
)
def test_a_warm_up_is_a_share_of_the_steps(share, total, steps):
    config = OptimizerConfig(warmup_proportion=share)
    plain = OptimizerConfig(warmup_steps=steps)
    wanted = lr_factor(plain, total)
    got = lr_factor(config, total)
    assert [got(n) for n in range(total)] == [wanted(n) for n in range(total)]


def test_a_warm_up_is_said_once():
    with pytest.raises(ValidationError, match="leave one out"):
        OptimizerConfig(warmup_steps=2, warmup_proportion=0.1)


def test_the_scale_halves_after_enough_overflows_and_doubles_after_enough_clean_steps():
    """By hand, with the defaults: a window of 5 and a hysteresis of 2, down to 1."""
    scale = LossScale(OptimizerConfig(initial_loss_scale=4.0))
    seen = []
    for is_finite in [False, False, False, False, False, *[True] * 5, False, False, *[True] * 4]:
        scale.update(is_finite)
        seen.append(scale.value)
    assert seen == [4, 2, 1, 1, 1, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1]
    again = LossScale(OptimizerConfig())
    again.restore(scale.notes)
    again.update(True)
    assert again.value == 2.0


def test_a_scaled_step_in_float16_is_the_step_without_a_scale(llama_dir):
    """The scale is a power of two: where nothing under- or overflows, no number changes but by what
    float16 loses of small gradients."""
    plain = open_engine(llama_dir, trainer=HALF, optimizer=scaled(initial_loss_scale=1.0))
    large = open_engine(llama_dir, trainer=HALF, optimizer=scaled(initial_loss_scale=1024.0))
    whole = open_engine(llama_dir)
    metrics = [step(engine) for engine in (plain, large, whole)]
    assert [m.get("loss_scale") for m in metrics] == [1.0, 1024.0, None]
    assert metrics[1]["grad_norm"] == pytest.approx(metrics[2]["grad_norm"], rel=1e-2)
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[2]["grad_norm"], rel=1e-2)
    assert metrics[1]["loss"] == pytest.approx(metrics[2]["loss"], rel=1e-2)
    parameters = parameters_of(large)
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert_close(parameters, parameters_of(whole), atol=2e-3)


def test_a_scale_that_overflows_skips_the_step_and_comes_down(llama_dir, tmp_path):
    engine = open_engine(llama_dir, trainer=HALF, optimizer=scaled(initial_loss_scale=2.0**32))
    before = parameters_of(engine)
    metrics = step(engine)
    assert (metrics["skipped_steps"], metrics["loss_scale"]) == (1.0, 2.0**32)
    assert_close(parameters_of(engine), before, atol=0.0)
    scales = [metrics["loss_scale"]]
    while metrics["skipped_steps"]:
        metrics = step(engine)
        scales.append(metrics["loss_scale"])
    # The first overflow is forgiven, each further one halves.
    assert scales == [2.0**32, *(2.0 ** (32 - n) for n in range(len(scales) - 1))]
    assert torch.isfinite(torch.tensor(metrics["grad_norm"]))
    moved = parameters_of(engine)
    assert any((moved[name] - before[name]).abs().max() > 1e-5 for name in moved)
    engine.save(SaveLoadMeta(str(tmp_path / "saved")))
    other = open_engine(llama_dir, trainer=HALF, optimizer=scaled(initial_loss_scale=2.0**32))
    other.load(SaveLoadMeta(str(tmp_path / "saved")))
    following = [step(each, seed=1) for each in (engine, other)]
    assert following[0] == following[1]
    assert_close(parameters_of(engine), parameters_of(other), atol=0.0)
