"""Whole runs of sft, rw and dpo: they learn, resume bit for bit after kill -9, and export."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from headway.contracts.errors import ConfigError, DataError
from headway.launch.launchers.preload import child_environment
from headway.runtime.config import validate_config
from headway.runtime.journal import METRICS_NAME, read_steps
from headway.runtime.process import Process, ProcessSpec
from tests.numeric.engines import open_engine
from tests.numeric.models import save_model, write_char_tokenizer
from tests.processes import start_process
from trainer.api import MicroBatchSpec
from trainer.data_supervised import Encoder, pack_examples, pairs
from trainer.dataflow.trace import TRACE_NAME
from trainer.experiments.base import EXPERIMENTS
from trainer.interfaces.reward_modeling import score_sequences
from trainer.tracking.lineage import LINEAGE_NAME

LONG_RUN = (
    "test_a_random_model_learns_to_prefer[ipo]",
    "test_a_random_model_learns_to_prefer[dpo-with-sft]",
)
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
DEADLINE_S = 90
LIKED, DISLIKED = "ABCDEFGHIJKLM", "NOPQRSTUVWXYZ"
PAD = 2  # a space, which no row holds


def write_rows(path: Path, count: int, seed: int) -> str:
    """Answers in letters of the first half of the alphabet are preferred to those of the second."""
    rng = random.Random(seed)

    def letters(which: str) -> str:
        return "".join(rng.choices(which, k=rng.randrange(2, 7)))

    with path.open("w") as file:
        for _ in range(count):
            chosen = letters(LIKED)
            row = {
                "prompt": letters(LIKED + DISLIKED) + ":",
                "chosen": chosen,
                "rejected": letters(DISLIKED),
                "completion": chosen,
                "margin": 0.5,
            }
            file.write(json.dumps(row) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """Model, rows and held-out rows."""
    root = tmp_path_factory.mktemp("start")
    write_char_tokenizer(save_model(root / "model", "llama"))
    write_rows(root / "train.jsonl", 1000, 0)
    write_rows(root / "held_out.jsonl", 200, 1)
    return root


def tree_of(kind: str, start: Path, out: Path, steps: int, **changes: Any) -> dict[str, Any]:
    model: dict[str, Any] = {"path": str(start / "model"), "seed": 3}
    if kind == "rw":
        model["head"] = "value"
    return {
        "type": kind,
        "run_dir": str(out / "run"),
        "output_dir": str(out / "model"),
        "model": model,
        "data": {"path": str(start / "train.jsonl"), "batch_size": 16},
        "held_out": {"path": str(start / "held_out.jsonl"), "every_steps": 5},
        "optimizer": {"lr": 2e-3, "warmup_steps": 2, "schedule": "linear"},
        "trainer": {"total_steps": steps, "max_tokens_per_mb": 128, "num_threads": 1},
        "recovery": {"every_steps": 4},
        **changes,
    }


def run(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """All of a run in this process; its figures by step."""
    experiment = EXPERIMENTS.get(tree["type"])
    experiment.run(validate_config(experiment.config, tree))
    return read_steps(Path(tree["run_dir"]) / METRICS_NAME)


@pytest.mark.parametrize(
    ("kind", "lr", "algorithm"),
    [
        ("rw", 4e-3, None),
        ("dpo", 4e-3, {"loss": "dpo", "beta": 0.1}),
        ("dpo", 1e-3, {"loss": "ipo", "beta": 0.1}),
        ("dpo", 4e-3, {"loss": "dpo", "sft_coef": 0.2, "label_smoothing": 0.1}),
    ],
    ids=["rw", "dpo", "ipo", "dpo-with-sft"],
)
def test_a_random_model_learns_to_prefer(kind, lr, algorithm, start, tmp_path):
    changes = {} if algorithm is None else {"algorithm": algorithm}
    changes["optimizer"] = {"lr": lr, "warmup_steps": 2, "schedule": "linear"}
    steps = run(tree_of(kind, start, tmp_path, 60, **changes))
    assert [step["step"] for step in steps] == list(range(60))
    judged = [step["eval_accuracy"] for step in steps if "eval_accuracy" in step]
    assert len(judged) == 12
    assert judged[-1] > 0.85  # of reward models with other orders of the rows, 0.89 to 0.94
    assert sum(step["accuracy"] for step in steps[-10:]) / 10 > 0.9
    assert steps[-1]["eval_loss"] < steps[4]["eval_loss"]
    if "sft_coef" in (algorithm or {}):
        assert {name for name in steps[-1] if not name.startswith("eval_")} == documented()
    if kind == "dpo":
        assert steps[0]["accuracy"] == 0.0  # the policy is its reference: no margin at all
        assert steps[0]["margin"] == pytest.approx(0.0, abs=1e-6)


def documented() -> set[str]:
    """The figures of pairs that the page lists, and of what all runs have."""
    names = {"loss", "tokens"}
    for section in re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE):
        if section.split("\n")[0] in ("optimizer", "preference", "speed", "run"):
            cells = re.findall(r"^\| (`[^|]*)\|", section, re.MULTILINE)
            names |= {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    return {
        name for name in names if not name.startswith("weight_transfer_")
    }  # of the hybrid engine


def test_demonstrations_are_imitated_and_held_out_rows_judged(start, tmp_path):
    steps = run(tree_of("sft", start, tmp_path, 20))
    judged = [step["eval_loss"] for step in steps if "eval_loss" in step]
    assert len(judged) == 4
    assert judged[-1] < judged[0] - 0.5
    assert all(step["tokens"] > 0 and step["train_s"] > 0 for step in steps)


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("sft", {"sft_train": "train_step"}),
        ("rw", {"rw_train": "train_step"}),
        ("dpo", {"ref_inf": "inference", "dpo_train": "train_step"}),
    ],
)
def test_steps_are_runs_of_the_graph_and_the_first_are_traced(kind, calls, start, tmp_path):
    steps = run(tree_of(kind, start, tmp_path, 3, dataflow={"trace_steps": 2}))
    assert all(step["grad_norm"] > 0.0 for step in steps)
    events = json.loads((tmp_path / "run" / TRACE_NAME).read_text())["traceEvents"]
    kinds = {"rows": "data", **calls}
    assert [(event["args"]["step"], event["name"], event["cat"]) for event in events] == [
        (step, name, category) for step in range(2) for name, category in kinds.items()
    ]
    ends = [event["ts"] + event["dur"] for event in events]
    assert all(end <= event["ts"] for end, event in zip(ends, events[1:], strict=False))


def test_margins_of_rows_are_asked_for(start, tmp_path):
    tree = tree_of("rw", start, tmp_path, 3)
    tree["data"]["margin_key"] = "margin"
    asked = run(tree)
    plain = run(tree_of("rw", start, tmp_path / "plain", 3))
    assert asked[0]["loss"] > plain[0]["loss"]
    assert asked[0]["accuracy"] == plain[0]["accuracy"]


@pytest.mark.parametrize("pad", [PAD, None], ids=["padding", "no-padding"])
def test_a_reward_model_scores_alike_in_transformers_and_starts_a_run(start, tmp_path, pad):
    source = tmp_path / "source"
    write_char_tokenizer(save_model(source, "llama"))
    if pad is not None:
        settings = json.loads((source / "tokenizer_config.json").read_text())
        (source / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": " "}))
    tree = tree_of("rw", start, tmp_path, 4)
    tree["model"]["path"] = str(source)
    run(tree)

    out = tmp_path / "model"
    data = validate_config(EXPERIMENTS.get("rw").config, tree).data
    held_out = pairs(data.model_copy(update={"path": str(start / "held_out.jsonl")}), Encoder(out))
    batch = pack_examples(held_out._examples)
    engine = open_engine(out, head="value")
    ones = [1] * len(batch.lengths)
    ours = engine.forward(batch, MicroBatchSpec(512), ones, score_sequences)
    judge = AutoModelForSequenceClassification.from_pretrained(out, local_files_only=True).eval()
    ids = torch.split(batch["input_ids"], list(batch.lengths))
    with torch.no_grad():
        apart = torch.cat([judge(row[None]).logits[0] for row in ids])
        torch.testing.assert_close(apart, ours, atol=2e-5, rtol=0)
        if pad is not None:
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad)
            real = torch.arange(padded.shape[1]) < torch.tensor(batch.lengths)[:, None]
            together = judge(padded, attention_mask=real.long()).logits[:, 0]
            torch.testing.assert_close(together, ours, atol=2e-5, rtol=0)

    again = tree_of("rw", start, tmp_path / "again", 2)
    again["model"]["path"] = str(out)
    trained = read_steps(tmp_path / "run" / METRICS_NAME)
    assert run(again)[0]["loss"] < trained[0]["loss"]  # it goes on where the first one ended


def test_a_model_that_pads_with_its_end_of_sequence_is_scored_in_front_of_it(start, tmp_path):
    source = tmp_path / "source"
    write_char_tokenizer(save_model(source, "llama"))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "</s>"}))
    tree = tree_of("rw", start, tmp_path, 2)
    tree["model"]["path"] = str(source)
    with_end = sum(step["tokens"] for step in run(tree_of("rw", start, tmp_path / "other", 2)))
    assert sum(step["tokens"] for step in run(tree)) == with_end - 2 * 16 * 2
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert judge.config.pad_token_id == 1
    row = torch.tensor([[40, 50, 45]])
    with torch.no_grad():
        ended = torch.cat([row, torch.tensor([[1, 1]])], dim=1)
        torch.testing.assert_close(judge(ended).logits, judge(row).logits)


@pytest.mark.parametrize(
    "kind", ["sft", *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("rw", "dpo"))]
)
def test_a_killed_run_resumes_to_the_same_bits(kind, start, tmp_path):
    whole = tree_of(kind, start, tmp_path / "whole", 9)
    killed = tree_of(kind, start, tmp_path / "killed", 9)
    for tree in (whole, killed):
        tree["model"] |= {"lora": {"rank": 2, "dropout": 0.2}}
    expected = run(whole)

    file = tmp_path / "killed.yaml"
    slow = killed | {"held_out": {"path": killed["held_out"]["path"], "every_steps": 1}}
    file.write_text(json.dumps(slow))
    process = start_trainer(file)
    journal = Path(killed["run_dir"]) / METRICS_NAME
    try:
        deadline = time.monotonic() + DEADLINE_S
        while len(read_steps(journal)) < 5:  # one beyond the checkpoint
            assert process.exit_code() is None and time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.stop(0.0)
    assert not Path(killed["output_dir"]).exists()
    with pytest.raises(ConfigError, match=r"recovery\.mode=resume"):
        run(killed)
    resumed = run(killed | {"recovery": {"every_steps": 4, "mode": "resume"}})
    names = ("loss", "grad_norm", "lr", "tokens")
    for one, two in zip(expected, resumed, strict=True):
        assert [one[name] for name in names] == [two[name] for name in names]
    assert resumed[-1]["eval_loss"] == expected[-1]["eval_loss"]
    lineage = (Path(killed["run_dir"]) / LINEAGE_NAME).read_text().splitlines()
    starts = [json.loads(line) for line in lineage]
    assert 0 == starts[0]["first_step"] < starts[1]["first_step"]
    assert starts[0]["run_id"] == starts[1]["run_id"]  # its curves go on
    one, two = (load_file(Path(t["output_dir"]) / "model.safetensors") for t in (whole, killed))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def start_trainer(file: Path) -> Process:
    argv = [sys.executable, "-m", "trainer", "--config", str(file)]
    return start_process(ProcessSpec("trainer", argv, None, child_environment(1)))


def test_the_time_limit_ends_a_run_with_a_checkpoint_and_an_export(start, tmp_path):
    steps = run(tree_of("sft", start, tmp_path, 1000, time_limit_s=1e-3))
    assert len(steps) == 1
    assert "eval_loss" in steps[0]
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()


def test_a_pair_that_fits_no_micro_batch_ends_a_run_before_its_first_step(start, tmp_path):
    tree = tree_of("dpo", start, tmp_path, 3)
    tree["trainer"]["max_tokens_per_mb"] = 10
    with pytest.raises(DataError, match=r"row \d+: .* raise trainer\.max_tokens_per_mb"):
        run(tree)
    assert not (tmp_path / "run").exists()


def test_a_reference_of_its_own_is_another_start(start, tmp_path):
    save_model(tmp_path / "reference", "llama", seed=9)
    tree = tree_of("dpo", start, tmp_path, 1, reference={"path": str(tmp_path / "reference")})
    assert abs(run(tree)[0]["margin"]) > 1e-3


@pytest.mark.parametrize(("kind", "head"), [("rw", "lm"), ("dpo", "value"), ("sft", "value")])
def test_an_experiment_says_which_head_it_trains(kind, head, start, tmp_path):
    tree = tree_of(kind, start, tmp_path, 1)
    tree["model"]["head"] = head
    wanted = "value" if kind == "rw" else "lm"
    with pytest.raises(ConfigError, match=rf"model\.head={head} .* set model\.head={wanted}"):
        validate_config(EXPERIMENTS.get(kind).config, tree)


def test_smoothing_beside_ipo_is_refused(start, tmp_path):
    tree = tree_of("dpo", start, tmp_path, 1, algorithm={"loss": "ipo", "label_smoothing": 0.1})
    with pytest.raises(ConfigError, match=r"label_smoothing=0\.1 is without effect"):
        validate_config(EXPERIMENTS.get("dpo").config, tree)
