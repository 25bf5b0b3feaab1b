"""What a user writes: an interface and a backend, from `examples/`, each of at most 60 lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from headway.contracts.config.experiment import GRPOExperiment
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.errors import ConfigError, UnknownName
from headway.contracts.registry import Registry
from headway.runtime.config import load_config
from headway.runtime.modules import import_modules
from tests.numeric.engines import random_batch, token_loss, tokens_in_loss
from tests.numeric.policies import ALONE, batch_of, experiment, open_models
from trainer.algorithms.advantage_registry import ADVANTAGE_ESTIMATORS
from trainer.algorithms.policy_loss_registry import POLICY_LOSSES
from trainer.api import MicroBatchSpec
from trainer.backends.base import BACKENDS
from trainer.interfaces.base import INTERFACES, register_interface

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def batch_baseline():
    yield from imported("custom_interface", "batch_baseline", INTERFACES)


@pytest.fixture(scope="module")
def calm():
    yield from imported("custom_backend", "calm", BACKENDS)


def imported(folder: str, name: str, registry: Registry):
    """A module of the examples, and gone again with what it registered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES / folder))
        import_modules([name])
        yield
        del registry._targets[name]
        del sys.modules[name]


@pytest.fixture(scope="module")
def soft_clip():
    yield from imported("custom_loss", "soft_clip", POLICY_LOSSES)
    del ADVANTAGE_ESTIMATORS._targets["rank"]


@pytest.mark.parametrize("file", [*EXAMPLES.glob("custom_*/*.py")], ids=lambda file: file.name)
def test_it_is_short(file):
    assert len(file.read_text().splitlines()) <= 60


def test_the_policy_learns_by_the_users_loss_and_estimator(llama_dir, soft_clip):
    config = load_config(
        GRPOExperiment, ["--config", str(EXAMPLES / "custom_loss" / "grpo.yaml")]
    ).algorithm
    section = config.model_dump(exclude_unset=True)
    models = open_models(experiment(llama_dir, "grpo", algorithm=section))
    seen = []
    train_batch = models.policy.train_engine.train_batch
    models.policy.train_engine.train_batch = lambda b, *args: (
        seen.append(b) or train_batch(b, *args)
    )
    rows = batch_of(0)
    gains = []
    for step in range(4):  # the same rollouts again and again: what is rewarded grows likelier
        metrics = models.learner.train_step(rows, version=0, step=step)
        gains.append(metrics["loss"])
        assert metrics["grad_norm"] > 0.0
        models.step_lr_schedulers(step)
    assert gains[-1] < gains[0]
    rewards = {}
    for row in rows:
        rewards.setdefault(row.rollout_id, []).append(row.reward)
    got = sorted({round(v, 5) for b in seen for v in b["advantages"].unique().tolist()})
    expected = {0.0}
    for own in rewards.values():
        for mine in own:
            order = sum((mine > other) - (mine < other) for other in own)
            expected.add(round(order / max(len(own) - 1, 1), 5))
    assert got == pytest.approx(sorted(expected))
    models.destroy()


def call(**changes):
    own = {
        "name": "advantages",
        "interface": {"name": "batch_baseline", "args": {"cost_per_token": 0.125}},
        "input_keys": ["action_mask", "scores"],
        "output_keys": ["advantages", "loss_mask"],
    }
    return {"trace_steps": 0, "calls": [own | changes]}


def test_the_policy_learns_by_the_advantages_of_the_users_interface(llama_dir, batch_baseline):
    config = experiment(llama_dir, "grpo", algorithm={"decoupled": False}, dataflow=call())
    models = open_models(config)
    seen = []
    train_batch = models.policy.train_engine.train_batch
    models.policy.train_engine.train_batch = lambda b, *args: (
        seen.append(b) or train_batch(b, *args)
    )
    rows = batch_of(0)
    metrics = models.learner.train_step(rows, version=0)
    (batch,) = seen
    rewards = [row.reward - 0.125 * int(row.loss_mask.sum()) for row in rows]
    mean = sum(rewards) / len(rewards)
    pieces = torch.split(batch["advantages"], list(batch.lengths))
    masks = torch.split(batch["loss_mask"], list(batch.lengths))
    order = [rows[at] for at in order_of(batch, rows)]
    for piece, mask, row in zip(pieces, masks, order, strict=True):
        reward = row.reward - 0.125 * int(row.loss_mask.sum())
        expected = torch.where(mask, torch.tensor(reward - mean), 0.0)
        torch.testing.assert_close(piece, expected.float())
        assert int(mask.sum()) == int(row.loss_mask[1:].sum())
    assert metrics["grad_norm"] > 0.0
    models.destroy()


def order_of(batch, rows) -> list[int]:
    """Which row each sequence of a batch is."""
    ids = [tuple(row.input_ids.tolist()) for row in rows]
    return [ids.index(tuple(p.tolist())) for p in torch.split(batch["input_ids"], batch.lengths)]


def test_what_is_wrong_with_a_call_is_said_before_a_model_is_loaded(tmp_path, batch_baseline):
    nowhere = tmp_path / "none"
    for changes, message in (
        ({"input_keys": ["action_mask", "score"]}, "reads 'score'.*did you mean 'scores'"),
        ({"name": "mine"}, "'advantages' and by 'mine'"),
        ({"output_keys": ["advantages"]}, "'actor_train' reads 'loss_mask'"),
    ):
        config = experiment(
            nowhere, "grpo", algorithm={"decoupled": False}, dataflow=call(**changes)
        )
        with pytest.raises(ConfigError, match=message):
            open_models(config)


def test_an_interface_is_looked_up_by_name_and_called_with_its_arguments(llama_dir, batch_baseline):
    def refused(part):
        dataflow = call(interface=part)
        return experiment(llama_dir, "grpo", algorithm={"decoupled": False}, dataflow=dataflow)

    with pytest.raises(UnknownName, match="did you mean 'batch_baseline'"):
        open_models(refused({"name": "batch_baselin"}))
    with pytest.raises(ConfigError, match="'batch_baseline' does not take"):
        open_models(refused({"name": "batch_baseline", "args": {"price": 1}}))


def test_a_name_is_registered_once(batch_baseline):
    with pytest.raises(ConfigError, match="'batch_baseline' is registered already"):
        register_interface("batch_baseline", object)


def test_the_users_backend_leaves_out_a_batch_whose_loss_jumps(llama_dir, calm):
    model = TrainedModelConfig(path=str(llama_dir))
    optimizer = OptimizerConfig(lr=1e-5)
    engine = BACKENDS.get("calm")(model, optimizer, TrainerConfig(total_steps=5), ALONE, None)
    engine.initialize(None, None)

    def skipped(loss) -> float:
        ask = (random_batch(0), MicroBatchSpec(100), loss, tokens_in_loss)
        return engine.train_batch(*ask)["skipped_steps"]

    def jump(output, batch):
        told = token_loss(output, batch)
        return type(told)(told.loss * 100.0, told.stats)

    assert skipped(token_loss) == 0.0
    before = [p.detach().clone() for p in engine._model.parameters()]
    assert skipped(jump) == 1.0
    after = engine._model.parameters()
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert skipped(token_loss) == 0.0
