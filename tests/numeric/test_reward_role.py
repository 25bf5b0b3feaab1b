"""The reward as a model, alone and beside the verifier: what is learned from, by the plain forward of the
model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForSequenceClassification

from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.ppo_code import PPOCodeExperiment
from headway.contracts.errors import ConfigError
from headway.contracts.types import Trajectory
from tests.numeric.engines import open_engine
from tests.numeric.policies import ALONE, batch_of, open_models
from trainer.algorithms.batch_advantages import compute_advantages
from trainer.api import MicroBatchSpec
from trainer.batching.sequences import SequenceBatch, batch_of_trajectories
from trainer.dataflow.policy import policy_calls
from trainer.interfaces.answers import spread_scores
from trainer.interfaces.base import InterfaceContext, make_interface
from trainer.interfaces.reward_role import RewardRole
from trainer.interfaces.reward_verifier import with_rows
from trainer.meter import Meter


@pytest.fixture(scope="module")
def reward_dir(llama_dir, tmp_path_factory) -> Path:
    """A sequence classification model with one label."""
    torch.manual_seed(5)
    config = AutoConfig.from_pretrained(llama_dir, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config)
    folder = tmp_path_factory.mktemp("reward")
    model.save_pretrained(folder)
    return folder


def experiment(folder: Path, reward_dir: Path | None = None, **ppo: Any) -> PPOCodeExperiment:
    tree = {
        "run_dir": str(folder / "unused"),
        "model": {"path": str(folder)},
        "data": {"path": "d", "batch_size": 4},
        "weight_sync": {"root": "w"},
        "trainer": {"max_tokens_per_mb": 40},
        "dataflow": {"trace_steps": 0},
        "ppo": {"kl_ctl": 0.0, "disable_value": True, "ppo_n_minibatches": 1, **ppo},
    }
    if reward_dir is not None:
        tree["reward_model"] = {"path": str(reward_dir)}
    return PPOCodeExperiment.model_validate(tree)


def rows() -> list[Trajectory]:
    numbers = {name: n for n, name in enumerate("abcd")}
    return [replace(row, rollout_id=f"run.{numbers[row.rollout_id]}") for row in batch_of(0)]


def batch() -> SequenceBatch:
    return with_rows(batch_of_trajectories(rows()), rows())


@torch.no_grad()
def plain_values(folder: Path) -> list[torch.Tensor]:
    """Of each sequence, the model's score of the text up to each token."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    return [
        model.score(model.model(torch.tensor(row.input_ids[None]).long()).last_hidden_state)[
            0, :, 0
        ]
        for row in rows()
    ]


def role(config: PPOCodeExperiment, reward_dir: Path) -> RewardRole:
    engine = open_engine(reward_dir, head="value")
    meter = Meter(config.metrics, ALONE)
    context = InterfaceContext(config, ALONE, MicroBatchSpec(40), meter, engine)
    return make_interface(ComponentConfig(name="reward_role"), context)


@pytest.mark.parametrize(
    ("options", "bias", "scaling"),
    [
        ({}, 0.0, 1.0),
        ({"rm_output_scaling": 3.0}, 0.0, 3.0),
        ({"reward_output_scaling": 2.0}, 0.0, 2.0),  # where rm_output_scaling is not given
        ({"reward_output_scaling": 2.0, "rm_output_scaling": 0.5}, 0.0, 0.5),
        ({"reward_output_bias": 0.25, "rm_output_scaling": 4.0}, 0.25, 4.0),
    ],
    ids=str,
)
def test_a_model_scores_an_answer_at_its_last_token(llama_dir, reward_dir, options, bias, scaling):
    config = experiment(llama_dir, reward_dir, reward_source="model", **options)
    columns = role(config, reward_dir).inference(batch())
    assert set(columns) == {"scores"}
    got = batch().with_columns(scores=columns["scores"]).per_sequence("scores")
    wanted = [(float(values[-1]) - bias) * scaling for values in plain_values(reward_dir)]
    assert got.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    # They are rewards already: nothing is shaped a second time.
    assert (config.algorithm.reward_scaling, config.algorithm.reward_bias) == (1.0, 0.0)


class Verifier:
    """Says right and wrong in turn."""

    def inference(self, batch: SequenceBatch) -> dict[str, torch.Tensor]:
        verdicts = [1.0 if n % 2 else -1.0 for n in range(len(batch.lengths))]
        return {"scores": spread_scores(verdicts, batch)}


def test_a_model_beside_the_verifier_adds_its_score(llama_dir, reward_dir):
    options = {"reward_output_bias": 0.5, "reward_output_scaling": 2.0, "rm_output_scaling": 3.0}
    config = experiment(llama_dir, reward_dir, reward_source="both", **options)
    alone = experiment(llama_dir, reward_dir, reward_source="model", rm_output_scaling=3.0)
    both = RewardRole(role(alone, reward_dir), Verifier(), 0.5, 2.0)
    got = batch().with_columns(**both.inference(batch())).per_sequence("scores")
    wanted = [
        ((1.0 if n % 2 else -1.0) - 0.5) * 2.0 + 3.0 * float(values[-1])
        for n, values in enumerate(plain_values(reward_dir))
    ]
    assert got.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    assert (config.algorithm.reward_scaling, config.algorithm.reward_bias) == (1.0, 0.0)


@pytest.mark.parametrize("delta", [True, False])
def test_dense_rewards_are_the_model_after_every_token(llama_dir, reward_dir, delta):
    config = experiment(
        llama_dir,
        reward_dir,
        reward_source="model",
        rw_type="dense",
        use_dense_reward=True,
        reward_delta=delta,
        rm_output_scaling=2.0,
        gae_lambda=0.0,
        adv_norm=False,
        max_reward_clip=0.5,
    )
    scored = batch().with_columns(**role(config, reward_dir).inference(batch()))
    got, _ = compute_advantages(config.algorithm, scored, version=0, kl_coef=0.0)
    wanted = []
    for row, values in zip(rows(), plain_values(reward_dir), strict=True):
        bounded = (2.0 * values).clamp(-0.5, 0.5).tolist()
        for t in range(row.num_tokens):
            is_action = t + 1 < row.num_tokens and row.loss_mask[t + 1]
            earned = bounded[t + 1] - (bounded[t] if delta else 0.0) if is_action else 0.0
            wanted.append(earned)
    assert got["advantages"].tolist() == pytest.approx(wanted, abs=1e-5)


def test_the_whole_step_asks_the_model(llama_dir, reward_dir):
    config = experiment(llama_dir, reward_dir, reward_source="model", rm_output_scaling=2.0)
    calls = {call.name: call for call in policy_calls(config)}
    assert (calls["rew_inf"].model, calls["rew_inf"].output_keys) == ("reward", ("scores",))
    models = open_models(config)
    metrics = models.learner.train_step(rows(), version=0)
    wanted = [2.0 * float(values[-1]) for values in plain_values(reward_dir)]
    assert metrics["reward"] == pytest.approx(sum(wanted) / len(wanted), abs=1e-5)
    assert set(models.checkpoint_contents.models) == {"model"}  # it is asked, and never trained


def test_a_dense_call_adds_both_columns(llama_dir, reward_dir):
    dense = {"rw_type": "dense", "use_dense_reward": True, "reward_source": "model"}
    config = experiment(llama_dir, reward_dir, **dense)
    calls = {call.name: call for call in policy_calls(config)}
    assert calls["rew_inf"].output_keys == ("scores", "dense_scores")
    assert "dense_scores" not in calls["actor_gen"].output_keys
    with_turns = {c.name: c for c in policy_calls(experiment(llama_dir, use_dense_reward=True))}
    assert "rew_inf" not in with_turns
    assert "dense_scores" in with_turns["actor_gen"].output_keys


@pytest.mark.parametrize(
    ("has_model", "options", "reason"),
    [
        (False, {"reward_source": "model"}, "wants a reward_model"),
        (True, {}, "asks no reward_model"),
        (False, {"rw_type": "dense"}, "reward_source=model"),
        (
            True,
            {"rw_type": "dense", "reward_source": "both", "use_dense_reward": True},
            "by a model",
        ),
        (True, {"use_dense_reward": True, "reward_source": "model"}, "rw_type=dense"),
        (False, {"rm_output_scaling": 2.0}, "scales the score of a model"),
        (True, {"reward_source": "model", "check_xml_format": True}, "asks no verifier"),
        (True, {"reward_source": "model", "check_verifier_status": True}, "asks no verifier"),
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_refused_by_name(
    llama_dir, reward_dir, has_model, options, reason
):
    with pytest.raises(ValidationError, match=reason):
        experiment(llama_dir, reward_dir if has_model else None, **options)


def test_other_experiments_have_no_reward_role(llama_dir):
    context = InterfaceContext(experiment(llama_dir), ALONE, MicroBatchSpec(40), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="with a reward_model"):
        make_interface(ComponentConfig(name="reward_role"), context)
