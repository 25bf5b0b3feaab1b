"""Calls that a configuration names: a `train_step` with a loss of one's own, `generate`, `save` and
`evaluate`, on rollouts and on rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.contracts.codec import encode_groups
from headway.contracts.config.dataflow import CallConfig
from headway.contracts.errors import ConfigError, DataError
from headway.contracts.types import TrajectoryBatch, TrajectoryGroup
from headway.runtime.config import validate_config
from tests.numeric.models import load_reference, reference_logits, save_model, write_char_tokenizer
from tests.numeric.policies import ALONE, batch_of, experiment, open_models, trajectory
from trainer.api import LossOutput
from trainer.batching.checks import check_batch
from trainer.checkpoint import RunState
from trainer.data import PromptData
from trainer.dataflow.policy import policy_flow
from trainer.experiments.sft import SFT_EXPERIMENT
from trainer.generated_batches import GeneratedBatches
from trainer.interfaces.base import INTERFACES, register_interface

UPDATE = {
    "name": "actor_train",
    "kind": "train_step",
    "interface": {"name": "reinforce", "args": {"scale": 2.0}},
    "model": "model",
    "input_keys": ["input_ids", "labels", "action_mask", "scores"],
}
GENERATION = {"name": "actor_gen", "kind": "generate", "interface": {"name": "replay"}}


class Reinforce:
    """Minus the score times the logprobs of what was sampled; no baseline, no ratio."""

    def __init__(self, context, scale: float = 1.0) -> None:
        self.context, self.scale = context, scale

    def train_step(self, batch):
        return self.context.model.train_batch(
            batch, self.context.mb_spec, self._loss, lambda b: float(b["action_mask"].sum())
        )

    def _loss(self, output, batch):
        mask = batch["action_mask"]
        logprobs = output.logprobs(batch["labels"], mask=mask)
        return LossOutput(-self.scale * (batch["scores"] * logprobs)[mask].mean())

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "own.txt").write_text(f"scale {self.scale}")


class Replay:
    """Trajectories of a fixed batch, under the ids that were asked for."""

    def __init__(self, context, order: int = 1) -> None:
        self.context, self.order, self.asked = context, order, []

    def generate(self, requests):
        self.asked.append(requests)
        groups = [
            TrajectoryGroup(
                request.rollout_id,
                request.prompt.group_id,
                tuple(
                    trajectory(at * 7 + i, request.rollout_id, i)
                    for i in range(request.prompt.group_size)
                ),
            )
            for at, request in enumerate(requests)
        ]
        return groups[:: self.order]


@pytest.fixture(scope="module", autouse=True)
def registered():
    register_interface("reinforce", Reinforce)
    register_interface("replay", Replay)
    yield
    for name in ("reinforce", "replay"):
        del INTERFACES._targets[name]


def with_calls(*calls) -> dict[str, object]:
    return {"trace_steps": 0, "calls": list(calls)}


def test_a_loss_of_ones_own_updates_the_policy_from_rollouts(llama_dir, tmp_path):
    config = experiment(llama_dir, "grpo", dataflow=with_calls(UPDATE))
    models = open_models(config)
    rows = batch_of(0)
    metrics = models.learner.train_step(rows, version=0)
    model = load_reference(llama_dir)
    total, count = 0.0, 0
    for row in rows:
        ids = row.input_ids.tolist()
        table = torch.log_softmax(reference_logits(model, ids), -1)
        sampled = row.loss_mask[1:].nonzero()[0]
        total += sum(row.reward * float(table[at, ids[at + 1]].detach()) for at in sampled)
        count += len(sampled)
    assert metrics["loss"] == pytest.approx(-2.0 * total / count, rel=1e-4)
    assert metrics["grad_norm"] > 0.0 and metrics["skipped_steps"] == 0.0
    models.export(tmp_path)
    assert (tmp_path / "model" / "own.txt").read_text() == "scale 2.0"
    models.destroy()


def test_an_interface_without_the_method_of_its_call_is_refused(llama_dir):
    call = UPDATE | {"kind": "inference", "output_keys": ["own"], "name": "mine"}
    with pytest.raises(
        ConfigError, match=r"'mine' has the kind inference, and .* 'reinforce' has no method"
    ):
        open_models(experiment(llama_dir, "grpo", dataflow=with_calls(call)))


def rows_file(folder: Path) -> str:
    file = folder / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"p{i}", "answer": "1"}) + "\n" for i in range(9))
    )
    return str(file)


def open_generation(llama_dir: Path, folder: Path, **args):
    call = GENERATION | {"interface": {"name": "replay", "args": args}}
    config = experiment(
        llama_dir,
        "grpo",
        data={"path": rows_file(folder), "batch_size": 4},
        rollout={"reward": {"name": "exact"}, "group_size": 3},
        dataflow=with_calls(call),
    )
    models = open_models(config)
    data = PromptData(config.data)
    return models, GeneratedBatches(models.generator, data, ALONE, config, RunState("run"))


def test_an_interface_generates_the_rollouts_of_a_step(llama_dir, tmp_path):
    models, source = open_generation(llama_dir, tmp_path)
    source.top_up(0)
    assert models.generator.asked == []  # nothing runs ahead
    first, second = source.next_batch(0), source.next_batch(0)
    asked = models.generator.asked
    assert [len(requests) for requests in asked] == [4, 4]
    assert [group.rollout_id for group in first.groups] == [r.rollout_id for r in asked[0]]
    names = [r.rollout_id for requests in asked for r in requests]
    assert len(set(names)) == 8 and [name.rpartition(".")[2] for name in names] == list("01234567")
    assert {r.gconfig.temperature for r in asked[0]} == {0.8}
    assert source.cursor == 8
    check_batch(TrajectoryBatch(second.groups), 0, 3, 0)
    source.consumed(first, 0, -1)
    assert models.learner.train_step(first.trajectories, version=0)["grad_norm"] > 0.0
    models.destroy()


def test_groups_that_were_not_asked_for_are_refused(llama_dir, tmp_path):
    models, source = open_generation(llama_dir, tmp_path)
    other = models.generator.generate
    models.generator.generate = lambda requests: [
        replace(g, rollout_id="x") for g in other(requests)
    ]
    with pytest.raises(DataError, match=r"generated the rollouts .*'x'.*return one group for each"):
        source.next_batch(0)
    models.generator.generate = lambda requests: []
    with pytest.raises(DataError, match="or fewer, under these ids"):
        source.next_batch(0)
    models.destroy()


def test_fewer_groups_are_a_smaller_batch(llama_dir, tmp_path):
    models, source = open_generation(llama_dir, tmp_path, order=2)
    batch = source.next_batch(0)
    assert len(batch.groups) == 2 and encode_groups(batch.groups)
    models.destroy()


def test_a_generating_call_replaces_that_of_the_experiment_and_adds_the_same(llama_dir):
    plain = policy_flow(experiment(llama_dir, "grpo"))
    flow = policy_flow(experiment(llama_dir, "grpo", dataflow=with_calls(GENERATION)))
    assert [(c.name, c.output_keys) for c in flow.calls] == [
        (c.name, c.output_keys) for c in plain.calls
    ]
    assert {c.interface for c in flow.calls if c.kind == "generate"} == {"replay"}
    assert {c.interface for c in plain.calls if c.kind == "generate"} == {"rollout"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "more"}, "one batch of rollouts; name it actor_gen"),
        ({"output_keys": ["a"]}, "leave input_keys and output_keys out"),
        ({"kind": "inference"}, "reads nothing"),
    ],
)
def test_a_generating_call_has_one_name_and_no_columns(changes, message):
    with pytest.raises(ConfigError, match=message):
        validate_config(CallConfig, GENERATION | changes, has_flags=False)


def sft_tree(folder: Path, **changes) -> dict[str, object]:
    write_char_tokenizer(save_model(folder / "model", "llama"))
    call = {
        "name": "sft_train",
        "kind": "train_step",
        "interface": {"name": "reinforce"},
        "model": "model",
        "input_keys": ["input_ids", "labels", "action_mask", "scores"],
    }
    derived = {
        "name": "scores",
        "interface": {"name": "constant_scores"},
        "input_keys": ["loss_mask"],
        "output_keys": ["action_mask", "scores"],
    }
    return {
        "type": "sft",
        "run_dir": str(folder / "run"),
        "output_dir": str(folder / "out"),
        "model": {"path": str(folder / "model")},
        "data": {"path": rows_file(folder), "completion_template": "{answer}", "batch_size": 4},
        "trainer": {"total_steps": 2},
        "dataflow": with_calls(derived, call),
        **changes,
    }


@pytest.fixture
def constant_scores():
    class Constant:
        def inference(self, share):
            mask = share["loss_mask"]
            return {"action_mask": mask, "scores": torch.ones(share.num_tokens)}

    register_interface("constant_scores", lambda context: Constant())
    yield
    del INTERFACES._targets["constant_scores"]


def test_several_interfaces_share_the_rows_of_a_step(tmp_path, constant_scores):
    SFT_EXPERIMENT.run(validate_config(SFT_EXPERIMENT.config, sft_tree(tmp_path)))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "step" in step]
    assert len(steps) == 2 and steps[0]["loss"] > 0.0
    assert (tmp_path / "out" / "own.txt").read_text() == "scale 1.0"


def test_held_out_rows_want_an_interface_that_evaluates(tmp_path, constant_scores):
    tree = sft_tree(tmp_path, held_out={"path": rows_file(tmp_path)})
    with pytest.raises(ConfigError, match="no interface that trains has a method `evaluate`"):
        SFT_EXPERIMENT.run(validate_config(SFT_EXPERIMENT.config, tree))


@pytest.mark.parametrize("changes", [{"model": "critic"}, {"name": "rows"}])
def test_rows_have_one_model_and_come_from_the_data(tmp_path, changes):
    call = UPDATE | {"name": "sft_train"} | changes
    tree = {
        "output_dir": "out",
        "model": {"path": "none"},
        "data": {"path": "none"},
        "dataflow": with_calls(call),
    }
    config = validate_config(SFT_EXPERIMENT.config, tree)
    assert SFT_EXPERIMENT.flow is not None
    with pytest.raises(ConfigError, match="none of an experiment on rows"):
        SFT_EXPERIMENT.flow(config)
