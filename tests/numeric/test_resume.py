"""Save, load into a fresh engine, go on: the same bits as a run that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.errors import ConfigError, StateError
from tests.numeric.engines import (
    assert_close,
    open_engine,
    parameters_of,
    random_batch,
    token_loss,
    tokens_in_loss,
)
from tests.numeric.models import save_model, write_char_tokenizer
from trainer.api import MicroBatchSpec, SaveLoadMeta
from trainer.checkpoint import CheckpointContents, Checkpoints, RunState
from trainer.topology import Topology

TOPOLOGY = Topology(0, 1, torch.device("cpu"))


def checkpoints_in(folder: Path, keep: int = 2, asynchronous: bool = False) -> Checkpoints:
    return Checkpoints(folder, RecoveryConfig(keep=keep, asynchronous=asynchronous), TOPOLOGY)


def parts_of(engine) -> CheckpointContents:
    return CheckpointContents({"model": engine})


def train(engine, steps):
    for seed in steps:
        engine.train_batch(random_batch(seed), MicroBatchSpec(40), token_loss, tokens_in_loss)
        engine.step_lr_scheduler()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(llama_dir, tmp_path, asynchronous):
    uninterrupted = open_engine(llama_dir)
    train(uninterrupted, range(5))

    state = RunState("run", step=3, version=4, cursor=96, trajectories=384)
    first = open_engine(llama_dir)
    train(first, range(3))
    torch.manual_seed(123)
    checkpoints = checkpoints_in(tmp_path, asynchronous=asynchronous)
    checkpoints.save(parts_of(first), state)
    drawn = torch.rand(3)
    train(first, range(3, 5))  # saving did not disturb the run that saved
    checkpoints.finish()

    resumed = open_engine(llama_dir)
    assert checkpoints_in(tmp_path).load_newest(parts_of(resumed)) == state
    assert torch.equal(torch.rand(3), drawn)
    train(resumed, range(3, 5))
    for engine in (first, resumed):
        got, expected = parameters_of(engine), parameters_of(uninterrupted)
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert engine._scheduler.get_last_lr() == uninterrupted._scheduler.get_last_lr()


def test_without_a_checkpoint_there_is_nothing_to_resume(llama_dir, tmp_path):
    assert checkpoints_in(tmp_path).load_newest(parts_of(open_engine(llama_dir))) is None


def test_the_newest_checkpoint_counts_and_old_ones_go(llama_dir, tmp_path):
    engine = open_engine(llama_dir)
    checkpoints = checkpoints_in(tmp_path, keep=2)
    for step in (9, 10, 11):
        checkpoints.save(parts_of(engine), RunState("run", step=step))
    names = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000010", "step-00000011"]
    assert checkpoints.load_newest(parts_of(engine)) == RunState("run", step=11)


def test_a_staging_directory_left_by_a_crash_is_not_a_checkpoint(llama_dir, tmp_path):
    engine = open_engine(llama_dir)
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(parts_of(engine), RunState("run", step=1))
    torn = tmp_path / "checkpoints" / ".staging" / "model"
    torn.mkdir(parents=True)
    (torn / "half").write_bytes(b"x")
    assert checkpoints.load_newest(parts_of(engine)) == RunState("run", step=1)
    checkpoints.save(parts_of(engine), RunState("run", step=2))
    assert not (tmp_path / "checkpoints" / ".staging").exists()
    assert not (tmp_path / "checkpoints" / "step-00000002" / "model" / "half").exists()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"step": 1}', '{"run_id": "r", "x": 1}']
)
def test_a_damaged_state_file_is_a_state_error_that_names_the_checkpoint(
    llama_dir, tmp_path, content
):
    engine = open_engine(llama_dir)
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(parts_of(engine), RunState("run", step=7))
    (tmp_path / "checkpoints" / "step-00000007" / "state.json").write_text(content)
    with pytest.raises(StateError, match="step-00000007 is damaged"):
        checkpoints.load_newest(parts_of(engine))


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04torn"])
def test_a_damaged_rng_file_is_a_state_error(llama_dir, tmp_path, content):
    engine = open_engine(llama_dir)
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(parts_of(engine), RunState("run", step=7))
    (tmp_path / "checkpoints" / "step-00000007" / "rng.pt").write_bytes(content)
    with pytest.raises(StateError, match="is damaged"):
        checkpoints.load_newest(parts_of(engine))


@pytest.mark.parametrize(
    ("kind", "num_layers"), [("qwen3", 2), ("gpt2", 2), ("llama", 3), ("llama", 1)]
)
def test_a_checkpoint_of_another_architecture_is_refused_and_changes_nothing(
    llama_dir, tmp_path, kind, num_layers
):
    other = open_engine(save_model(tmp_path / "other", kind, num_layers=num_layers))
    train(other, range(1))
    other.save(SaveLoadMeta(str(tmp_path / "saved")))
    engine = open_engine(llama_dir)
    before = parameters_of(engine)
    with pytest.raises(ConfigError, match="does not fit the model"):
        engine.load(SaveLoadMeta(str(tmp_path / "saved")))
    assert_close(parameters_of(engine), before, atol=0.0)


def test_a_missing_checkpoint_directory_is_a_config_error(llama_dir, tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        open_engine(llama_dir).load(SaveLoadMeta(str(tmp_path / "nowhere")))


def test_weights_alone_load_without_optimizer(llama_dir, tmp_path):
    trained = open_engine(llama_dir)
    train(trained, range(2))
    meta = SaveLoadMeta(str(tmp_path / "weights"), with_optim=False)
    trained.save(meta)
    fresh = open_engine(llama_dir)
    fresh.load(meta)
    assert_close(parameters_of(fresh), parameters_of(trained), atol=0.0)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_exported_directory_is_a_whole_hugging_face_model(tmp_path, kind):
    source = save_model(tmp_path / "source", kind)
    write_char_tokenizer(source)
    engine = open_engine(source)
    train(engine, range(1))
    engine.save(SaveLoadMeta(str(tmp_path / "out"), weight_format="hf"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    got = {name: p.detach() for name, p in exported.named_parameters()}
    assert_close(got, parameters_of(engine), atol=0.0)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    with pytest.raises(ConfigError, match=r"model\.path"):
        engine.load(SaveLoadMeta(str(tmp_path / "out"), weight_format="hf"))


def test_a_directory_without_a_model_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_engine(tmp_path)


def test_random_weights_follow_from_the_seed(llama_dir):
    one = parameters_of(open_engine(llama_dir, init_from_scratch=True, seed=5))
    same = parameters_of(open_engine(llama_dir, init_from_scratch=True, seed=5))
    other = parameters_of(open_engine(llama_dir, init_from_scratch=True, seed=6))
    assert_close(same, one, atol=0.0)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_an_export_that_fails_leaves_no_directory_and_the_next_one_is_whole(llama_dir, tmp_path):
    engine = open_engine(llama_dir)
    out = SaveLoadMeta(str(tmp_path / "out"), weight_format="hf")
    (tmp_path / ".out.staging").write_text("in the way")
    with pytest.raises(OSError, match="staging"):
        engine.save(out)
    assert not (tmp_path / "out").exists()
    (tmp_path / ".out.staging").unlink()
    (tmp_path / ".out.staging").mkdir()
    (tmp_path / ".out.staging" / "torn.safetensors").write_bytes(b"x")  # by a process that died
    engine.save(out)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "torn.safetensors").exists()
    engine.save(out)  # over itself
    assert_close(parameters_of(open_engine(tmp_path / "out")), parameters_of(engine), atol=0.0)
