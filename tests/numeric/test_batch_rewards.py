"""Scores of a whole batch by a reward model, as transformers reads them; and what an answer is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig
from transformers import LlamaForSequenceClassification as LlamaJudge

from tests.numeric.engines import LENGTHS, open_engine, random_batch
from tests.numeric.models import EOS, SPREAD, VOCAB_SIZE
from tests.numeric.policies import batch_of, experiment, open_models
from tests.numeric.ranks import run_ranks
from tests.unit.gateway.rollout_builders import make_trajectory
from trainer.api import MicroBatchSpec
from trainer.batching.sequences import SequenceBatch, batch_of_trajectories, shift_left
from trainer.interfaces.answers import AnswerTextRule, prompts_and_answers, spread_scores
from trainer.interfaces.reward_model import ModelReward, last_tokens, padding_of_model
from trainer.interfaces.reward_verifier import with_rows
from trainer.topology import Topology

ALONE = Topology(0, 1, torch.device("cpu"))
SPEC = MicroBatchSpec(20)
PAD = 2


@pytest.fixture(scope="module")
def judge_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classification model with one label, as `type: rw` writes one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=SPREAD,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=PAD,
        num_labels=1,
    )
    folder = tmp_path_factory.mktemp("judge")
    LlamaJudge(config).save_pretrained(folder)
    return folder


def ended_batch(num_padding: int) -> SequenceBatch:
    """Some sequences end with padding, one has nothing else."""
    batch = random_batch(0)
    ids = batch["input_ids"].clone()
    ids[ids == PAD] = PAD + 1
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    for end in ends[::2]:
        ids[end - num_padding : end] = PAD
    ids[ends[4] : ends[5]] = PAD
    return batch.with_columns(input_ids=ids)


@torch.no_grad()
def slow_scores(folder: Path, batch: SequenceBatch) -> list[float]:
    """transformers' own, one sequence at a time, in float64."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    rows = torch.split(batch["input_ids"], list(batch.lengths))
    return [model(input_ids=row[None]).logits[0, 0].item() for row in rows]


@pytest.mark.parametrize("num_padding", [0, 1, 2])
def test_a_reward_model_scores_as_transformers_does(judge_dir: Path, num_padding: int):
    batch = ended_batch(num_padding)
    padding = padding_of_model(str(judge_dir))
    assert padding == PAD
    engine = open_engine(judge_dir, head="value")
    got = ModelReward(engine, ALONE, SPEC, padding).inference(batch)
    assert got.keys() == {"scores"}
    assert got["scores"].shape == (batch.num_tokens,)
    assert got["scores"].dtype == torch.float32
    expected = spread_scores(slow_scores(judge_dir, batch), batch)
    torch.testing.assert_close(got["scores"], expected, atol=2e-5, rtol=0)
    assert got["scores"].unique().numel() == len(LENGTHS)
    shaped = ModelReward(engine, ALONE, SPEC, padding, bias=-0.5, scaling=3.0).inference(batch)
    torch.testing.assert_close(shaped["scores"], (expected - 0.5) * 3.0, atol=1e-4, rtol=0)


def test_without_padding_the_very_last_token_is_read():
    batch = ended_batch(2)
    lengths = torch.tensor(LENGTHS)
    ends, starts = lengths.cumsum(0) - 1, lengths.cumsum(0) - lengths
    assert last_tokens(batch, None).equal(ends)
    wanted = ends - torch.tensor([2, 0, 2, 0, 2, 0, 2])
    wanted[5] = starts[5]
    assert last_tokens(batch, PAD).equal(wanted)


def _model_scores(topology: Topology, folder: Path, batch: SequenceBatch) -> torch.Tensor:
    engine = open_engine(folder, topology=topology, head="value")
    return ModelReward(engine, topology, SPEC, PAD).inference(batch)["scores"]


@pytest.mark.extended
def test_two_ranks_have_the_scores_of_one(judge_dir: Path, tmp_path: Path):
    batch = ended_batch(1)
    first, second = run_ranks(2, tmp_path / "ranks", _model_scores, judge_dir, batch)
    assert first.equal(second)
    alone = _model_scores(ALONE, judge_dir, batch)
    torch.testing.assert_close(first, alone, atol=1e-5, rtol=0)


def packed(*rows: str) -> SequenceBatch:
    """Sequences of characters; what stands in capitals was sampled."""
    lengths = tuple(map(len, rows))
    text = "".join(rows)
    ids = torch.tensor([ord(c) for c in text])
    sampled = torch.tensor([c.isupper() for c in text])
    columns = {"input_ids": ids, "action_mask": shift_left(sampled, lengths, False)}
    return SequenceBatch(lengths, columns)


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_a_prompt_ends_at_the_first_sampled_token_and_an_answer_is_the_last_stretch():
    batch = packed("abCDE", "aBcdEFg", "abc", "aBCdeF", "aB")
    got = [(text_of(p), text_of(a)) for p, a in prompts_and_answers(batch)]
    assert got == [("ab", "CDE"), ("a", "EF"), ("abc", ""), ("a", "F"), ("a", "B")]


def test_a_rule_reads_the_text_of_each_answer(judge_dir: Path):
    batch = packed("ab01CD", "ab01E", "ab01FFFF")

    def longer(score: float, text: str) -> float:
        assert re.fullmatch(r"CD|E|FFFF", text)
        return score + 10.0 * len(text)

    got = AnswerTextRule(text_of, longer).apply([1.0, 2.0, 3.0], batch)
    assert got == [21.0, 12.0, 43.0]


def test_rows_are_numbered_by_the_position_that_a_rollout_id_ends_with():
    names = ["run.0.5.17", "run-2.3", "run-2.3"]
    trajectories = [make_trajectory(name, index) for index, name in enumerate(names)]
    batch = with_rows(batch_of_trajectories(trajectories), trajectories)
    assert batch.per_sequence("row").tolist() == [17, 3, 3]
    assert batch["row"].shape == (batch.num_tokens,)
    assert batch.select([1]).per_sequence("row").tolist() == [3]


def test_a_reward_model_takes_the_place_of_the_rollouts_scores(llama_dir: Path, judge_dir: Path):
    interface = {"name": "reward_model", "args": {"path": str(judge_dir), "scaling": 2.0}}
    call = {
        "name": "rew_inf",
        "interface": interface,
        "input_keys": ["input_ids"],
        "output_keys": ["scores"],
    }
    rows = batch_of(0)
    config = experiment(llama_dir, "grpo", dataflow={"trace_steps": 0, "calls": [call]})
    models = open_models(config)
    asked = models.learner.train_step(rows, version=0)
    batch = batch_of_trajectories(rows)
    engine = open_engine(judge_dir, head="value")
    scores = ModelReward(engine, ALONE, SPEC, PAD, scaling=2.0).inference(batch)["scores"]
    told = SequenceBatch(batch.lengths, {"scores": scores}).per_sequence("scores").tolist()
    judged = [replace(row, reward=score) for row, score in zip(rows, told, strict=True)]
    plain = open_models(experiment(llama_dir, "grpo")).learner.train_step(judged, version=0)
    assert asked["reward"] == pytest.approx(sum(told) / len(told), rel=1e-6)
    assert asked["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-6)
    given = open_models(experiment(llama_dir, "grpo")).learner.train_step(rows, version=0)
    assert asked["grad_norm"] != pytest.approx(given["grad_norm"], rel=1e-3)
